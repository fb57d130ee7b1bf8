"""The processes of a run: how they start, what each does with the workers that it has, and how they end.

- start and end: `launch`, `child`, `start`, `membership`, `guardian`, `ends`, `stall`; before: `check_run`.
- a run: `rank`, its `world` on a `device`, its `rows`, `training_loop`, `consequences` of evaluations, `best_weights`.
- a user's own loop: `pipeline`, with the `readings` of its workers; its `rows` walk as far as it feeds them.
- what processes tell each other: `minibatch_notes` with each minibatch, `new_shapes`.
- evaluations: `distributed_evaluation`, `evaluation_while_training`; callbacks: `run_callbacks`.
- checkpoints: `checkpoints` while it trains, `resume`, `last_saved`.
- results: `run_summary`, `collect_trace`.
"""
