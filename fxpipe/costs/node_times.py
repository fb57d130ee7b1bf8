"""How long every node of a program takes in its place, between the previous and the next node, in plain code.

Forward and backward are each run twice: unchanged, and with a clock's tick between every two nodes. A node gets all the
time between two ticks, including the freeing of values after their last use; nothing is interpreted. The time of the
ticks, and the delays that they cause, are removed again: a phase's nodes are scaled to add up to the phase without
ticks.

On a shared machine most runs of a phase are disturbed, but some are not: the fastest counts. A single node is so short
that most of its runs are not disturbed: the median counts. A phase whose times contradict each other is measured once
more, and the more consistent times count.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fxpipe.costs.node_costs_file import MeasuredCosts, device_name, doubt, fingerprint, read
from fxpipe.costs.timer import Rounds, clock_of
from fxpipe.errors import BuildError, CaptureError
from fxpipe.ir.aten import is_getitem
from fxpipe.ir.printer import call_text, heading
from fxpipe.ir.program import Program, info
from fxpipe.messages import saying
from fxpipe.plan.spec import Phase
from fxpipe.random_state import torch_state_kept
from fxpipe.threads import threads as worker_threads
from fxpipe.torch_private import OpOverload

PHASES: tuple[Phase, Phase] = ("F", "B")
ROUNDS = Rounds(budget=1.5, least=2, most=100, long=20.0)
"""Each round is a plain run and one with ticks: few for a long step, one for a very long one."""

AGAIN = Rounds(budget=1.5, least=2, most=100)
"""The rounds of a phase that is measured once more."""

SHORT = 10.0
"""A second measurement follows only if the measured rounds took at most this many seconds."""

AGREE = 0.02
"""The spread of a phase, or its doubt, above which it is measured once more."""

Times = tuple[dict[str, float], dict[str, float], float]


@dataclass(frozen=True)
class Yardstick:
    """A program, and by phase the seconds that it took when it was measured."""

    program: Program
    seconds: Mapping[str, float]

    @staticmethod
    def of(program: Program, seconds: Mapping[str, float]) -> Yardstick:
        """Of a program whose nodes took these seconds, by name."""
        return Yardstick(program, {p: sum(seconds[n.name] for n in program if info(n).phase == p) for p in PHASES})


def node_costs(
    program: Program,
    threads: int | None = None,
    known: Path | None = None,
    repeats: int | None = None,
    yardstick: Yardstick | None = None,
) -> MeasuredCosts:
    """An earlier compile's costs if they are for this program and not in doubt, else new ones.

    Forward and backward are run on the model's own device.

    Args:
        threads: as many CPU threads as one worker will have.
        known: where an earlier compile may have saved its costs; with a yardstick, to which they are not comparable,
            they are not used.
        repeats, yardstick: as for `measure`.

    Raises:
        CaptureError: the step fails on the example batch, or does not fit the device; names the node's place.
    """
    mark = fingerprint(program, device_name(program.device), threads or torch.get_num_threads())
    warnings: tuple[str, ...] = ()
    if known is not None and yardstick is None:
        try:
            costs = read(known, mark)
            complete = costs is not None and costs.seconds.keys() == {n.name for n in program}
            if costs is not None and complete and not _doubts(costs.ratios):
                return costs
        except BuildError as error:
            warnings = (f"{error.what} ({error.where}); they are measured again",)
    seconds, ratios, spread = measure(program, threads, repeats, yardstick)
    return MeasuredCosts(mark, seconds, ratios, spread, (*warnings, *_doubts(ratios)))


def _doubts(ratios: Mapping[str, float]) -> tuple[str, ...]:
    names = {"F": "forward", "B": "backward"}
    return tuple(
        f"the times of {names[phase]}'s nodes add up to {1 / ratio:.2f} times what it takes as a whole; they were "
        "scaled to fit, but the machine may have been busy: compile again when it is not"
        for phase, ratio in ratios.items()
        if doubt(ratio)
    )


def measure(
    program: Program, threads: int | None = None, repeats: int | None = None, yardstick: Yardstick | None = None
) -> Times:
    """Each node's seconds, by phase the ratio they were scaled by (the whole's time over their sum), and their spread.

    The spread is the share of the step's time that two halves of the rounds put on different sides of some cut: how far
    off a worker's share of the work may be. It is 0 if there was only one round.

    Plain runs and runs with ticks alternate, so that a machine that is slower for a while is slower for both. On CUDA
    the ticks are events of the stream. The random state stays unchanged.

    A shared machine is faster at one moment than at the next, by far more than the difference between two numbers of
    microbatches. So a yardstick also runs in every round, and what it takes now, against what it took then, scales the
    times.

    Args:
        threads: CPU threads while measuring; None means as many as there are.
        repeats: runs of each kind after the warm-up, without a second measurement; None means as `ROUNDS` says.
        yardstick: the times are what they would have been when this program was measured; None: as they are now.

    Raises:
        CaptureError: the step fails on the example batch, or does not fit the device; names the node's place.
    """
    plain = [_Code(program, phase, ticks=False) for phase in PHASES]
    ticking = [_Code(program, phase, ticks=True) for phase in PHASES]
    meanwhile = [] if yardstick is None else [_Code(yardstick.program, phase, ticks=False) for phase in PHASES]
    with worker_threads(threads or torch.get_num_threads(), 1), torch_state_kept(), torch.no_grad():
        _run(ticking)  # first, since it can name the node that fails
        _run(plain)
        if meanwhile:
            _run(meanwhile)
        by_phase = _timed(plain, ticking, meanwhile, ROUNDS if repeats is None else Rounds.exactly(repeats))
        if repeats is None and any(t.disagrees > AGREE for t in by_phase) and sum(t.taken for t in by_phase) < SHORT:
            most = 2 if by_phase[1].disagrees > AGREE else 1  # a backward runs after its forward
            again = _timed(plain[:most], ticking[:most], meanwhile[:most], AGAIN)
            by_phase[:most] = [
                new if old.disagrees > max(AGREE, new.disagrees) else old
                for old, new in zip(by_phase, again, strict=False)
            ]
    if yardstick is not None:
        by_phase = [times.scaled_to(yardstick.seconds[phase]) for phase, times in zip(PHASES, by_phase, strict=True)]
    pairs = [zip(code.nodes, times.seconds, strict=True) for code, times in zip(ticking, by_phase, strict=True)]
    seconds = {node.name: spent for rows in pairs for node, spent in rows}
    ratios: dict[str, float] = {phase: times.ratio for phase, times in zip(PHASES, by_phase, strict=True)}
    whole = sum(seconds.values())
    return seconds, ratios, sum(t.spread * sum(t.seconds) for t in by_phase) / whole if whole else 0.0


@dataclass(frozen=True)
class _PhaseTimes:
    """The times of a phase, as `measure` describes them.

    Attributes:
        taken: by all of its measured runs.
        meanwhile: the yardstick's fastest run in the same rounds; 0 if it has no such phase, or there is no yardstick.
    """

    seconds: list[float]
    ratio: float
    spread: float
    taken: float
    meanwhile: float

    @property
    def disagrees(self) -> float:
        """How far its times contradict each other: two halves, or the parts and the whole."""
        return max(self.spread, doubt(self.ratio))

    def scaled_to(self, taken: float) -> _PhaseTimes:
        """The times as they were when the yardstick took that many seconds."""
        factor = taken / self.meanwhile if taken and self.meanwhile else 1.0
        return replace(self, seconds=[factor * seconds for seconds in self.seconds])


def _timed(plain: list[_Code], ticking: list[_Code], meanwhile: list[_Code], rounds: Rounds) -> list[_PhaseTimes]:
    """The phases of this code, each run unchanged and with ticks in every round, and so is the yardstick's code."""
    wholes: list[list[float]] = []
    others: list[list[float]] = []
    nodes: list[list[list[float]]] = []
    with saying(lambda: f"timing {sum(len(code.nodes) for code in plain)} operators, run {len(nodes) + 1}"):
        for _ in rounds.run():
            wholes.append([sum(times) for times in _run(plain)])
            if meanwhile:
                others.append([sum(times) for times in _run(meanwhile)])
            nodes.append(_run(ticking))
    return [
        _phase_times([run[i] for run in wholes], [run[i] for run in nodes], [run[i] for run in others])
        for i in range(len(plain))
    ]


def _phase_times(
    wholes: Sequence[float], nodes: Sequence[Sequence[float]], meanwhile: Sequence[float] = ()
) -> _PhaseTimes:
    medians = _medians(nodes)
    total = sum(medians)
    ratio = min(wholes) / total if total else 1.0
    halves = [list(accumulate(_medians(nodes[k::2]))) for k in (0, 1)] if total and len(nodes) > 1 else []
    spread = max((abs(a / halves[0][-1] - b / halves[1][-1]) for a, b in zip(*halves, strict=True)), default=0.0)
    return _PhaseTimes(
        [m * ratio for m in medians], ratio, spread, sum(wholes) + sum(map(sum, nodes)), min(meanwhile, default=0.0)
    )


def _medians(runs: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(row) for row in zip(*runs, strict=True)]


class _Code:
    """One phase of a program as generated Python.

    Backward takes forward's values from a list and forgets each after its last use, as an emitted stage does.
    """

    def __init__(self, program: Program, phase: Phase, ticks: bool) -> None:
        self.phase = phase
        self.feed = {**program.values, **program.example}
        self.nodes = [n for n in program if info(n).phase == phase]
        self.clock = clock_of(program.device)
        self.tick = _event_tick if program.device == "cuda" else self._tick
        mine = set(self.nodes)
        used = dict.fromkeys(i for n in self.nodes for i in n.all_input_nodes if i not in mine)
        self.arguments = [n.name for n in used if n.op == "placeholder"]
        self.taken = [n.name for n in used if n.op != "placeholder"]
        results = dict.fromkeys(n for n in program.output_nodes if n in mine)
        if phase == "F":
            results |= {n: None for n in self.nodes if any(u.op == "call_function" and u not in mine for u in n.users)}
        self.results = [n.name for n in results]
        self.function = self._compiled(list(results), list(used), ticks)

    def __call__(self, values: dict[str, Any]) -> list[float]:
        """Run once: takes its inputs from `values`, leaves its results there; returns the seconds between the ticks."""
        if not self.nodes:
            return []
        ticks: list[Any] = []
        taken = [values.pop(name) for name in reversed(self.taken)]
        arguments = [self.feed[name] for name in self.arguments]
        self.tick(ticks)
        try:
            results = self.function(ticks, taken, *arguments)
        except Exception as error:
            raise self._failed(error, len(ticks) - 1) from error
        self.tick(ticks)
        values.update(zip(self.results, results, strict=True))
        if self.tick is not _event_tick:
            return [after - before for before, after in pairwise(ticks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(ticks)]

    def _tick(self, ticks: list[float]) -> None:
        ticks.append(self.clock())

    def _compiled(self, results: list[fx.Node], used: list[fx.Node], ticks: bool) -> Any:
        """`run(ticks, taken, *arguments)`: written as text, like a stage, since an fx.GraphModule takes far longer."""
        names = {n: f"v{i}" for i, n in enumerate((*used, *self.nodes))}
        last = {n: reader for reader in self.nodes for n in (reader, *reader.all_input_nodes)}
        dying: dict[fx.Node, list[str]] = {}
        for node in last.keys() - set(results):
            dying.setdefault(last[node], []).append(names[node])
        arguments = [names[n] for n in used if n.op == "placeholder"]
        scope: dict[str, Any] = {"torch": torch, "aten": torch.ops.aten, "tick": self.tick}
        lines = [f"def run({', '.join(['ticks', 'taken', *arguments])}):"]
        lines += [f"    {names[n]} = taken.pop()" for n in used if n.op != "placeholder"]
        for i, node in enumerate(self.nodes):
            if ticks and i:  # the caller makes the first and the last tick
                lines.append("    tick(ticks)")
            call = call_text(node, names.__getitem__, short=True)
            if not isinstance(node.target, OpOverload) and not is_getitem(node):
                scope[f"f{i}"] = node.target
                call = f"f{i}({call.partition('(')[2]}"
            lines.append(f"    {names[node]} = {call}")
            if node in dying:
                lines.append(f"    del {', '.join(dying[node])}")
        lines.append(f"    return [{', '.join(names[n] for n in results)}]")
        exec(compile("\n".join(lines), f"<{self.phase} under the clock>", "exec"), scope)
        return scope["run"]

    def _failed(self, error: Exception, position: int) -> CaptureError:
        node = self.nodes[min(max(position, 0), len(self.nodes) - 1)]
        where = heading(info(node)) or str(node)
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in message:
            return CaptureError(
                f"the whole step does not fit this device: {message}",
                where=where,
                hint="--cost analytic, or --device-spec NAME, computes the times from shapes and needs no memory",
            )
        return CaptureError(
            f"the step fails on the first batch: {message}",
            where=where,
            hint="if loss(model, batch) fails in eager PyTorch too, check the batch, its dtypes and the range of its "
            "values; if not, this is a bug in fxpipe: the step was captured differently from how it runs",
        )


def _run(codes: list[_Code]) -> list[list[float]]:
    """Forward, then backward: the seconds between the ticks of each."""
    values: dict[str, Any] = {}
    return [code(values) for code in codes]


def _event_tick(ticks: list[Any]) -> None:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    ticks.append(event)
