"""Checkpoints on disk: what a run must have to go on, in safetensors and JSON, whole or not at all."""
