"""One worker: its stage, its weights, its optimizer, its data.

- `assembly` opens one; `executor` does its actions; `stage_code` is its stage for a shape of batch.
- weights: `initial_weights`, `weights` (what each action reads), `weight_copies` (what others read), `averages`,
  `staleness`, `final_weights`.
- updates: `gradients` added up, `clip` and `loss_scaler`, whose numbers travel as `update_notes`, `update`;
  `optimizer_state` across cuts; `not_finite`.
- replicas: `shared_update` (each makes a part), `outer_step` (they train apart), `replicas_alike` (they read the same).
- `feed` gives worker 0 its data, `buffers_reset` calls the hook for epochs, `offload` moves saved values away.
- `captures` and `checkpoint` are what is saved of it and read back; an `observer` follows it.
- `evaluation` is its part in evaluations.
"""
