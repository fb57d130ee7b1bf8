"""The processes of a run: how they start, what each does with its workers, and how they end.

- start and end: `check_run`, then `launch`, `child`, `start`, `membership`, `guardian`, `ends`, `stall`.
- runs and loops: a job in a `world` on a `device`, whose `rows` go as far as a limit in the `training_loop`.
- a run: `rank`, its `run_data`, `steps_recorded`, `consequences` of evaluations, `best_weights`, `stopping`.
- a user's own loop: `pipeline`; its calls and its rows are in `own_loop`.
- what processes send each other: `minibatch_notes` with each minibatch, `new_shapes`.
- evaluations: `distributed_evaluation`, `evaluation_while_training`; callbacks: `run_callbacks`.
- checkpoints: `checkpoints` during training, `resume`, `last_saved`.
- results: `run_summary`, `timelines`.
"""
