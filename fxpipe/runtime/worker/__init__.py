"""One worker: its stage, its weights, its optimizer, its data.

- `assembly` opens one; `executor` does its actions; `stage_code` is its stage for a shape of batch.
- weights: `initial_weights`, `weights` (the worker's own), `versions` (what actions read), `weight_copies`, `averages`,
  `final_weights`.
- updates: `gradients` added up; `clip` and `loss_scaler`, whose numbers `update_notes` tells; `update`, `not_finite`.
- replicas: `between_replicas` (losses, buffers, what is alike), `outer_step` (they train apart).
- `feed` gives worker 0 its data, `offload` moves saved values away.
- `captures` are what is saved of it, and when; an `observer` follows it.
- `evaluation` is its part in evaluations.
"""
