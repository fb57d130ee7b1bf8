"""Loads an emitted stage, calls it, turns its parts into pure graphs, and compares values."""
