"""Checkpoints on disk: what a run needs to continue, in safetensors and JSON, whole or not at all."""
