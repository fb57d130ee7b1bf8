"""What travels between workers, in one process and among several.

`transport` is the interface, `mailbox` and `distributed` are the two there are. `addresses` gives every message its
channel and tag; its bytes are those of `fxpipe/plan/packing.py`; `moves` sends tensors of evaluations.
"""
