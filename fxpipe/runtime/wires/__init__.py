"""What travels between workers, in one process and among several.

`transport` is the interface, `mailbox` and `distributed` are its two implementations. `addresses` gives every message
its channel and tag; `fxpipe/plan/packing.py` says what its bytes are; `moves` lists tensors that evaluations send.
"""
