"""The planner: which units every worker runs, forward and backward apart. Pure functions of a profile; no torch.

`profile` (costs of a chain of units, read from JSON or from PipeDream's text) → `balance` (cuts that minimise the
slowest worker's time). Communication and memory are not in the objective yet.
"""
