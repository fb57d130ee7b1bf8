"""Describes a build: what runs where, which values cross workers, and which weights each action sees.

`subject` reads a build from its folder or from memory. `facts` makes one dict of plain JSON of it, with one file for
each topic. cli/inspect.py prints the facts in the terminal, report/ shows them as a page. No tensor is loaded.
"""
