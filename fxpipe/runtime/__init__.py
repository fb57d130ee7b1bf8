"""What happens at run time: `wires/` (messages), `worker/` (one worker's part), `process/` (the processes around them).

`options` says how a run goes; every layer passes it on whole. In the order of a run:

- `process/launch` starts a `process/child` for each worker, which does what `process/rank` says; or
  `process/local_run` trains all workers in this process, with `process/local`.
- `worker/feed` gives the data. `worker/assembly` loads a worker: `initial_weights` (`checkpoint`, `initialise`),
  `weights` with its `update` (`gradients`, `clip`), `executor`.
- `process/loop`, or `local` for all workers in turn, gives the executor one action after the other. It reads weights
  (`pending_reads`: which will be read again; `predictions`), calls emitted code (`stage_code`), and sends and receives
  over a `wires/transport`: `mailbox` in one process, `distributed` between processes, by its `addresses`.
- Between two actions, and at the end, `worker/evaluator` evaluates (`evaluation_data`; `process/local_evaluation` or
  `process/distributed_evaluation`; `wires/moves`: tensors that it reads elsewhere).
- `worker/final_weights`, `wires/trace` (`clocks`) and `process/run_summary` write what the run leaves.
"""
