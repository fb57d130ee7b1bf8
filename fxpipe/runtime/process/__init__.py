"""The processes of a run: how they start, what they do in which order, how they end.

- Start: `launch.py` (with `child.py` and `guardian.py`), `local_run.py` or `open_pipeline.py`. Before the first step:
  `check_run.py`, `warnings.py`, `membership.py`, `agreement.py`, `resume.py`, `allocator.py`.
- Where the ranks are: `world.py`, `device.py`; what is walked there: `rows.py`; what all do at once: `together.py`.
- Loops: `rank.py` and `training_loop.py` for a run; for a user's own `pipeline.py`, `fed_rows.py`, `alike.py`,
  `readings.py`, `own_checkpoint.py`. `minibatch_notes.py` tells of each minibatch; `new_shapes.py` makes its shape.
- `between_actions.py`: callbacks (`run_callbacks.py`), checkpoints (`checkpoints.py`, `agenda.py`), epochs
  (`epochs.py`), evaluations (`evaluation_while_training.py`, `distributed_evaluation.py`) and what follows from these
  (`consequences.py`, `goal.py`, `best_weights.py`).
- End: `ends.py`, `stall.py`, `last_saved.py`. Results: `run_summary.py`, `collect_trace.py`.
"""
