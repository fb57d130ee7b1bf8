"""What travels between workers, in one process and among several.

- `transport` is what a worker asks for, and what emitted code sends and receives with; `wired` does it over `Wires`.
- `processes` are the wires over gloo or NCCL, with an `outbox` of what waits its turn; `one_process` those within a
  process, whose rows take turns; `throttled` makes those between processes slow.
- `addresses` gives every message its channel and tag; `fxpipe/plan/packing.py` says what its bytes are.
- `collective` is what replicas add up and hand out, `replica_group` over processes.
- `group` connects the processes, `doors` keeps others out; `exchange` is for texts, objects from all, and clocks.
"""
