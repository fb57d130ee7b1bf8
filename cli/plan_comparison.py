"""`fxpipe plan --microbatches 1,2,4,8`: speed, memory and staleness of several numbers of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from fxpipe.cli.output import echo, print_table, size
from fxpipe.cli.planned import Planned, Read, Say, planned

from fxpipe.lowering.options import CompileOptions

if TYPE_CHECKING:
    from fxpipe.inspection.staleness import Staleness
    from fxpipe.planner.partition import Partition
    from fxpipe.simulator.result import Simulation

COMPARED = ("same", "bidirectional")
"""The kinds of cuts among which `compile` chooses."""


@dataclass(frozen=True)
class Compared:
    """One number of microbatches: the plan and its fastest kind of cuts, or why there is none."""

    microbatches: int
    staleness: Staleness | None = None
    plan: Planned | None = None
    refused: str = ""

    @property
    def fastest(self) -> tuple[Partition, Simulation]:
        """The partition that the simulation finishes first."""
        plan = self.plan
        assert plan is not None
        mode = min(plan.simulated, key=lambda mode: plan.simulated[mode].seconds_per_minibatch)
        return plan.found[mode], plan.simulated[mode]


def compare(
    read: Read, options: CompileOptions, counts: Sequence[int], modes: Sequence[str], say: Say
) -> list[Compared]:
    """Capture, cost, plan and simulate each.

    Raises:
        FxpipeError: no number can be planned; what the first one fails with.
    """
    from fxpipe.errors import FxpipeError
    from fxpipe.inspection.staleness import staleness_of
    from fxpipe.policy import make as make_policy
    from fxpipe.schedule.versions import versions_of

    rows: list[Compared] = []
    failed: FxpipeError | None = None
    for count in counts:

        def told(text: str, count: int = count) -> None:
            say(f"{count} microbatch{'' if count == 1 else 'es'}: {text}")

        try:
            made = planned(read(count, "three-way" in modes, told), options, modes, told)
        except FxpipeError as error:
            failed = failed or error
            rows.append(Compared(count, refused=error.what))
            continue
        versions = versions_of(made.setting.schedule_of(options.stages))
        policy = make_policy(made.setting.policy or "")
        rows.append(Compared(count, staleness_of(policy, versions), made))
    if failed is not None and all(row.refused for row in rows):
        raise failed
    return rows


def comparison_json(rows: Sequence[Compared]) -> dict[str, Any]:
    """One object a number, in the order that was asked."""
    return {"microbatches": [_row_as_json(row) for row in rows]}


def _row_as_json(row: Compared) -> dict[str, Any]:
    if row.plan is None or row.staleness is None:
        return {"microbatches": row.microbatches, "refused": row.refused}
    partition, simulation = row.fastest
    samples = row.plan.subject.samples
    return {
        "microbatches": row.microbatches,
        "policy": row.plan.setting.policy,
        "staleness": asdict(row.staleness),
        "cuts": partition.mode,
        "milliseconds": 1e3 * simulation.seconds_per_minibatch,
        "samples_per_second": None if samples is None else simulation.samples_per_second(samples),
        "bubble": simulation.bubble,
        "efficiency": partition.efficiency,
        "memory_bytes": [load.memory for load in partition.loads],
    }


def print_comparison(rows: Sequence[Compared]) -> None:
    """A row a number, and why some cannot be."""
    from fxpipe.inspection.staleness import ago

    lines = []
    for row in rows:
        if row.plan is None or row.staleness is None:
            lines.append([str(row.microbatches), "refused", *[""] * 6])
            continue
        partition, simulation = row.fastest
        samples = row.plan.subject.samples
        speed = f"{1e3 * simulation.seconds_per_minibatch / row.microbatches:.2f} ms a microbatch"
        if samples is not None:
            speed = f"{simulation.samples_per_second(samples):.1f}"
        lines.append(
            [
                str(row.microbatches),
                ago(row.staleness.updates) if row.staleness.updates else "none",
                row.plan.setting.policy or "",
                speed,
                size(max(load.memory for load in partition.loads)),
                f"{100 * simulation.bubble:.0f} %",
                f"{partition.efficiency:.3f}",
                partition.mode,
            ]
        )
    headers = ["microbatches", "staleness", "policy", "samples/s", "memory", "bubble", "efficiency", "cuts"]
    print_table(headers, lines)
    for row in rows:
        if row.refused:
            echo(f"{row.microbatches}: {row.refused}")
    echo("staleness: the updates that a forward misses at most; memory: of the worker that holds most")
