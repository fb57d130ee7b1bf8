"""Runs emitted code and measures how long it takes: stages, engines, links."""
