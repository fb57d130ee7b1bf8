"""Running a build: `wires/` (messages), `worker/` (one worker), `process/` (the processes that hold the workers).

`options.py` has the options of a run; every layer passes them on whole. The way of a run:

- `process/launch.py` starts `process/child.py`, which imports torch, forks the workers, and has each join the others
  (`process/rank.py`). torchrun's processes join as they are; `process/local_run.py` has all workers in this process.
- A `Run` (`process/rank.py`) opens its workers (`worker/assembly.py`). `process/training_loop.py` gives their executors
  (`worker/executor.py`) one action after the other, which call emitted code and send and receive over `wires/wired.py`.
- A user's own loop moves a `Pipeline` (`process/pipeline.py`) instead, call by call.
- `process/between_actions.py` says what is due between two actions, `process/run_summary.py` what the run did.
"""
