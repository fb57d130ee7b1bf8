"""How long a schedule takes on given workers and links. Pure Python: only `of_build` imports torch.

scenario (the inputs) → simulate (the run) → result. `of_build` and `of_partition` make the inputs from a build or a
partition.
"""
