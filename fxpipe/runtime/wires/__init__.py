"""The messages between workers, in one process and among several.

- `transport` is the interface of sends and receives for workers and emitted code; `wired` implements it on `Wires`.
- `processes` are the wires between processes: `shared_memory` on one machine, `peer_memory` between its CUDA devices;
  gloo, with an `outbox` for messages that wait for their turn; NCCL, where the ends of `nccl_lines` agree before each
  message. `throttled` slows them.
  `one_process` are the wires within a process, whose rows take turns. `carriers` says which is used, and why.
- `addresses` gives every message its channel and tag; `fxpipe/plan/packing.py` defines its bytes.
- `collective` adds up and sends what replicas exchange; `replica_group` does it between processes.
- `environment` reads which process this is; `group` connects the processes, `doors` keeps others out; `exchange` is for
  texts, objects from all, and clocks; `run_folder` keeps the texts on one machine.
"""
