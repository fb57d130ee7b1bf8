"""What a run must know, as data: the plan, the build's folder, how values are packed, what things cost."""
