"""The planner: which units every worker runs, forward, backward and weight gradients apart. Pure functions; no torch.

A `profile` says what every unit costs, a `setting` what it is planned for. `cost_model` is the stated model: what a
worker costs in time and memory for the units between two boundaries. `partition` finds, for each kind of cuts, the plan
whose slowest worker is fastest: first plans from `balance` (exact for times alone), windows around the best of them
(`candidates`), then all that could still be better (`search`), which proves it or says by how much it may be off.
"""
