"""Running a build: `wires/` (messages), `worker/` (one worker), `process/` (the processes that hold the workers).

`options` holds the options of a run; every layer passes them on whole. In the order of a run:

- `process/launch` starts (`guardian`) a `process/child`, which imports torch and forks the workers,
  that run `process/rank`, and watches them (`ends`); or `process/start` trains all workers in
  this process, with `process/local`. `wires/group` connects the processes (`doors`).
- `worker/feed` gives the data. `worker/assembly` loads a worker: `initial_weights` (from `checkpoint` or
  `model_initial_values`), `weights` with its `update` (`gradients`, `clip`), `executor`.
- `process/training_loop`, or `local` for all workers in turn, gives the executor one action after the other. The
  executor reads weights (`pending_reads`: which will be read again; `predictions`), calls emitted code (`stage_code`),
  and sends and receives over a `wires/transport`: `mailbox` in one process, `distributed` between processes, by its
  `addresses`.
- Between two actions, and at the end, `worker/evaluation` evaluates (`process/local_evaluation` or
  `process/distributed_evaluation`; `wires/moves`: the tensors that it reads from other workers).
- `worker/final_weights`, `process/collect_trace` and `process/run_summary` write the results of the run.
"""
