"""Looks at a build: what runs where, which values cross workers, and which weights every action sees.

subject (what is looked at, from a folder or from memory) → facts (one dict of plain JSON, gathered by one file per
concept) → what prints them: the terminal in cli/inspect.py, the page in report/. No tensor is ever loaded.
"""
