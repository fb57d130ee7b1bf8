"""What travels between workers, in one process and among several, and how a worker waits for it.

- `transport.py` is what a worker asks of its messages; `wired.py` does it over any `Wires`. `addresses.py` gives every
  message its channel and tag; `fxpipe/plan/packing.py` says what its bytes are.
- The `Wires`: `one_process.py`; `processes.py`, with `outbox.py` (over gloo, urgent messages pass) and `rendezvous.py`
  (NCCL); `throttled.py`, which are slower.
- `turns.py`: of the rows that one process walks, one that waits lets the others go on.
- `collective.py`: what the replicas of a worker add up; `replica_group.py` does it between processes.
- `group.py` connects processes, and `doors.py` lets nobody else in. Beside the messages: `exchange.py` (texts),
  `clocks.py` (how far clocks are apart).
- `moves.py`: the tensors that an evaluation reads on other workers.
"""
