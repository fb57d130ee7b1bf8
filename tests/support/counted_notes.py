"""Code that a user's script begins with to count, by their first word, the notes that its process sends."""

COUNTING = """
from collections import Counter
from fxpipe.runtime.wires.wired import WiredTransport

told, send_note = Counter(), WiredTransport.send_note


def counting(self, to, what, numbers):
    told[what[0]] += 1
    send_note(self, to, what, numbers)


WiredTransport.send_note = counting
"""
