"""One worker: its stage, its weights, its optimizer, its data.

- `assembly` opens one; `executor` does its actions; `stage_code` is its stage for a shape of batch.
- weights: `initial_weights`, `weights` (the worker's own), `versions` (what actions read), `weight_copies`, `averages`,
  `final_weights`.
- updates: `gradients` added up; `clip` and `loss_scaler`, whose numbers `update_notes` sends; `update`, `not_finite`.
- replicas: `between_replicas` (losses, buffers, checks that all are alike), `outer_step` (they train separately).
- `feed` gives worker 0 its data; `offload` moves saved values to the CPU.
- `captures` takes its part of checkpoints; an `observer` follows it.
- `evaluation` does its part of evaluations.
"""
