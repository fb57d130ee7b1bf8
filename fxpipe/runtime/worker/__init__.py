"""One worker: its stage, its weights, its optimizer, its data.

- `assembly` opens one from its `setting`; `executor` does its actions; `stage_code` is its stage for a shape of batch.
- weights: `initial_weights`, `weights` (the worker's own), `versions` (what actions read), `weight_copies`,
  `final_weights`.
- updates: `gradients` are added up; then each `part` of the list in `weights` does its own: `loss_scaler`, `clip`,
  `update` (the optimizer, and a policy around it; its `scheduler`), `outer_step`, `averages`, `between_replicas`,
  `staleness`. `not_finite` explains bad numbers.
- hooks: `state_of_hooks` follows what they change in `watched_places`, and refuses to change parameters.
- `feed` gives worker 0 its data; `offload` moves saved values to the CPU.
- `captures` takes its part of checkpoints; an `observer` follows it.
- `evaluation` does its part of evaluations.
"""
