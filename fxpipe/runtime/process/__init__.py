"""The processes of a run: how they start, what each does with its workers, and how they end.

- start and end: `check_run`, then `launch`, `child`, `start`, `membership`, `guardian`, `ends`, `stall`.
- a run: `rank`, its `world` on a `device`, its `rows`, `training_loop`, `consequences` of evaluations, `best_weights`.
- a user's own loop: `pipeline`, with the `readings` of its workers; its `rows` walk as far as it feeds them.
- what processes send each other: `minibatch_notes` with each minibatch, `new_shapes`.
- evaluations: `distributed_evaluation`, `evaluation_while_training`; callbacks: `run_callbacks`.
- checkpoints: `checkpoints` during training, `resume`, `last_saved`.
- results: `run_summary`, `collect_trace`.
"""
