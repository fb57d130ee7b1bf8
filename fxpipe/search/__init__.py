"""Which schedule, with how many microbatches and which cuts, takes the least time: plans and simulates, without torch.

candidate (what is compared) → plans (the planner's cuts for each) → simulated_plan (a trial of one plan) → climb (cuts
that the simulator likes better) → reasons (what the others lose) → search (all of it, ranked).
"""

from __future__ import annotations

from fxpipe.search.candidate import Candidate, Counts, Question, Sized, counted, microbatch_counts, schedules_of
from fxpipe.search.search import Ranking, search
from fxpipe.search.simulated_plan import Judge

__all__ = [
    "Candidate",
    "Counts",
    "Judge",
    "Question",
    "Ranking",
    "Sized",
    "counted",
    "microbatch_counts",
    "schedules_of",
    "search",
]
