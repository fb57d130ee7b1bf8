"""One worker: its stage, its weights, its optimizer, its data.

- `assembly.py` loads a worker; `executor.py` walks its actions; `stage_code.py` surrounds a call of emitted code, and
  `offload.py` takes saved values off the device.
- `weights.py`: what each action reads, with `pending_reads.py`, `predictions.py` and `weight_copies.py`. First values:
  `initial_weights.py`, from `checkpoint.py` or `model_initial_values.py`.
- `update.py` makes the step, from `gradients.py`; `clip.py` and `loss_scaler.py` see those of all workers. Of the
  optimizer: `optimizer_state.py`, `averages.py`, `staleness.py`.
- Replicas: `shared_update.py`, `outer_step.py`, `replicas_alike.py`.
- `feed.py`: worker 0's data. `evaluation.py`: an evaluation's batches, code and means. `buffers_reset.py`: the hook.
- What leaves a worker: `captures.py` (its part of checkpoints), `final_weights.py`, `not_finite.py` (an error).
"""
