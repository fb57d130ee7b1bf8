"""The messages between workers, in one process and among several.

- `transport` is the interface of sends and receives for workers and emitted code; `wired` implements it on `Wires`.
- `processes` are the wires between processes: `shared_memory` on one machine, `peer_memory` between its CUDA devices;
  gloo, with an `outbox` for messages that wait for their turn; NCCL, where the ends of `nccl_lines` agree before each
  message. `throttled` slows them.
  `one_process` are the wires within a process, whose rows take turns.
- `addresses` gives every message its channel and tag; `fxpipe/plan/packing.py` defines its bytes.
- `collective` adds up and sends what replicas exchange; `replica_group` does it between processes.
- `board` has what processes say to each other that is no tensor: in a folder, in a store of torch, or in a dict.
- `meeting` reads which process this is, and keeps others out; `group` connects the processes; `exchange` is for calls
  that all make together, such as an object from each.
- `measured_links`: a process notes when its messages leave and arrive, and the launcher measures the links by that.
"""
