"""Running a build: `wires/` (messages), `worker/` (one worker), `process/` (the processes that hold the workers).

`options` holds the options of a run; every layer passes them on whole. In the order of a run:

- `process/launch` starts a `process/child`, which imports torch and forks the workers; each begins in `process/start`,
  as does a run in one process, or the pipeline of a user's own loop. A `process/world` says where all ranks are.
- `process/rows` opens the workers here: `worker/assembly` loads each, with `worker/weights`, `worker/update`,
  `worker/executor`. `process/rank` is a run of them, `process/pipeline` a loop of the user's over them.
- `process/training_loop` walks a row: it gives the executor one action after the other. The executor reads weights,
  calls emitted code, and sends and receives by `wires/wired`.
- `process/distributed_evaluation` evaluates, with a `worker/evaluation` for each worker.
- `worker/final_weights`, `process/timelines` and `process/run_summary` write the results of the run.
"""
