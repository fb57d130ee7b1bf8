"""One worker: its stage, its weights, its optimizer, its data.

- `assembly` opens one from its `setting`; `executor` does its actions; `stage_code` is its stage for a shape of batch.
- weights: `initial_weights`, `weights` (the worker's own), `versions` (what actions read), `weight_copies`,
  `final_weights`.
- updates: `gradients` are added up; then each `part` of the list in `parts` does its own: `loss_scaler`, `clip`,
  `update` (the optimizer), `around_step` (of a policy), `outer_step`, `shared_update`, `averages`, `between_replicas`,
  `staleness`. `update_notes` sends their numbers; `not_finite` explains bad ones.
- replicas: `replicas_alike` checks that they are; `vector` has the tensors that they add up.
- hooks: `state_of_hooks` follows what they change in `watched_places`; `parameters_of_hooks` refuses to change weights.
- `feed` gives worker 0 its data; `offload` moves saved values to the CPU.
- `captures` takes its part of checkpoints; an `observer` follows it.
- `evaluation` does its part of evaluations.
"""
