"""The planner: which units every worker runs in forward, backward and for weight gradients. It needs no torch.

A `profile` has the costs of every unit, a `setting` the schedule, policy and devices to plan for. `cost_model` says
what a worker costs, in time and memory, for the units between two boundaries. For each mode of cuts, `partition` finds
the plan whose slowest worker is fastest. It starts with plans from `balance`, which are best if only times count,
searches windows around the best of them (`candidates`), and then all plans that could still be better (`search`). That
proves that the plan is best, or bounds how far it may be from the best.
"""
