"""The planner: which units every worker runs in forward, backward and for weight gradients. No torch.

A `profile` says what every unit costs, a `setting` for what it is planned. `cost_model` states the model: what a worker
costs in time and memory for the units between two boundaries. `partition` finds, for each kind of cuts, the plan whose
slowest worker is fastest: it starts with plans from `balance` (exact if only times count), looks at windows around the
best of them (`candidates`), then at everything that could still be better (`search`). That proves the plan, or bounds
how far it may be from the best. The search is pure; `profile`, `device` and `costs_file` read their files.
"""
