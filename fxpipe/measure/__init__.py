"""Runs what was emitted and says how long it takes: stages, engines, links."""
