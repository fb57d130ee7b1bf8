"""Warns, by the results of the accuracy study, before a run that resembles one with a large loss of accuracy."""

from __future__ import annotations

WORTH_A_WARNING = 0.1

LOST: dict[tuple[str, str, int], float] = {
    ("spectrain+ef", "SGD", 1): 0.009,
    ("spectrain", "SGD", 1): 0.009,
    ("latest", "SGD", 1): 0.037,
    ("2bw", "SGD", 1): 0.134,
    ("spectrain", "SGD", 3): 0.077,
    ("latest", "SGD", 3): 0.098,
    ("stash", "SGD", 3): 0.102,
    ("pipeoptim", "SGD", 3): 0.114,
    ("lwp", "SGD", 3): 0.115,
    ("spectrain", "SGD", 7): 0.111,
    ("spectrain+ef", "SGD", 7): 0.135,
    ("stash", "SGD", 7): 0.137,
    ("latest", "SGD", 7): 0.152,
    ("lwp", "SGD", 7): 0.167,
    ("pipeoptim", "SGD", 7): 0.176,
    ("latest+ef", "AdamW", 1): -0.021,
    ("pipeoptim", "AdamW", 1): -0.021,
    ("xgrad", "AdamW", 1): -0.017,
    ("lwp", "AdamW", 1): -0.013,
    ("spectrain+brake", "AdamW", 1): -0.009,
    ("spectrain+ef", "AdamW", 1): -0.005,
    ("2bw+predict+ef", "AdamW", 1): -0.001,
    ("2bw+predict", "AdamW", 1): 0.005,
    ("stash", "AdamW", 1): 0.015,
    ("spectrain", "AdamW", 1): 0.016,
    ("latest", "AdamW", 1): 0.036,
    ("2bw", "AdamW", 1): 0.110,
    ("spectrain+ef", "AdamW", 2): 0.036,
    ("spectrain", "AdamW", 2): 0.045,
    ("spectrain+brake", "AdamW", 3): 0.024,
    ("spectrain", "AdamW", 3): 0.062,
    ("xgrad", "AdamW", 3): 0.063,
    ("spectrain+ef", "AdamW", 3): 0.108,
    ("latest", "AdamW", 3): 0.125,
    ("lwp", "AdamW", 3): 0.126,
    ("stash", "AdamW", 3): 0.132,
    ("pipeoptim", "AdamW", 3): 0.134,
    ("spectrain", "AdamW", 7): 0.183,
    ("pipeoptim", "AdamW", 7): 0.215,
    ("spectrain+ef", "AdamW", 7): 0.224,
    ("lwp", "AdamW", 7): 0.231,
    ("latest", "AdamW", 7): 0.280,
    ("stash", "AdamW", 7): 0.283,
    ("spectrain", "AdamW", 15): 0.182,
    ("spectrain+ef", "AdamW", 15): 0.272,
    ("latest", "AdamW", 15): 0.284,
    ("spectrain+ef", "Muon", 1): -0.008,
    ("spectrain", "Muon", 1): 0.002,
    ("2bw+predict+ef", "Muon", 1): 0.005,
    ("latest", "Muon", 1): 0.020,
}
"""By policy, optimizer and the number of updates that the first worker's forward misses: the share of the synchronous
result (accuracy, or nats per byte) that was lost at the policy's best learning rate, as the mean over the workloads of
benchmarks/accuracy. With one microbatch, 4 workers miss 3 updates and 8 workers miss 7; N workers with N miss 1."""


def lost_by(policy: str, behind: int) -> str | None:
    """What a policy lost in the study, for the nearest number of missed updates; None if unknown."""
    studied = {b for name, _, b in LOST if name == policy}
    if not studied:
        return None
    nearest = min((b for b in studied if b >= behind), default=max(studied))
    shares = sorted(share for (name, _, b), share in LOST.items() if (name, b) == (policy, nearest))
    return (
        f"{policy} lost {shares[0]:.0%} to {shares[-1]:.0%} of the synchronous result where forwards missed {nearest} "
        "(benchmarks/accuracy)"
    )


def warning(policy: str, optimizer: str, behind: int) -> str | None:
    """One sentence for a policy that lost a tenth or more in the study, else None.

    Args:
        policy: its text, including options; policies that were not studied cause no warning.
        optimizer: the name of its type. Adam and similar ones count as AdamW, which was studied.
        behind: how many updates the first worker's forward misses.
    """
    family = "AdamW" if "Adam" in optimizer else optimizer
    studied = max((b for _, o, b in LOST if o == family and b <= behind), default=None)
    if studied is None:
        return None
    lost = {name: share for (name, o, b), share in LOST.items() if (o, b) == (family, studied)}
    share = lost.get(policy, 0.0)
    if share < WORTH_A_WARNING:
        return None
    best = min(lost, key=lambda name: lost[name])
    other = "fewer workers or more microbatches make weights less stale"
    if best != policy:
        other = f"{best} lost {lost[best]:.0%}; {other}"
    return (
        f"policy {policy} with {family} lost {share:.0%} of the synchronous result where forwards missed "
        f"{studied} updates (benchmarks/accuracy); {other}"
    )
