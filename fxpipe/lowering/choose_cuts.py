"""Where forward and backward are cut: as given, before named modules, or as the planner finds best."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fxpipe.errors import CutError, near
from fxpipe.ir.program import Program, info
from fxpipe.lowering.options import CompileOptions
from fxpipe.passes.analysis.sources import sources_of
from fxpipe.passes.recompute import LEAST, Room
from fxpipe.planner.branches import graph_of_cuts
from fxpipe.planner.cuts import Cuts
from fxpipe.planner.links import Links
from fxpipe.planner.partition import Partition, of_cuts, repriced
from fxpipe.planner.profile import Profile
from fxpipe.planner.separate_cuts import worth_messages
from fxpipe.planner.setting import Setting
from fxpipe.schedule.check import moments
from fxpipe.schedule.graph import Graph
from fxpipe.search.side_by_side import planned_side_by_side


@dataclass(frozen=True)
class Choice:
    """The cuts, and the partitions that the planner compared, the chosen one last; none if the cuts were given.

    `rooms` say how much each worker may keep between the actions of microbatches; none where nothing limits it.
    """

    cuts: Cuts
    partitions: tuple[Partition, ...] = ()
    rooms: tuple[Room, ...] = ()


def choose_cuts(
    program: Program, profile: Profile, options: CompileOptions, setting: Setting, known: tuple[Partition, ...] = ()
) -> Choice:
    """The cuts of a program whose units are numbered; from the planner's result, if that is already `known`.

    Raises:
        TooLittleMemory: nothing fits; the error says what would.
        CutError: more workers than units, an unknown path, cuts out of order, cuts for another number of workers or
            units, or a cut that would separate readers of a buffer from the unit that updates it.
    """
    marks = marked(program)
    takes_marks = options.takes_marks(len(marks))
    if options.planned and not takes_marks:
        found = known or _planned(profile, options, setting)
        best = found[-1]
        return Choice(best.cuts, found, _rooms(profile, best, options, setting))
    count = len(program.units)
    if options.cuts == "given" and not takes_marks:
        raise CutError(
            f"{options.stages} workers need {options.stages - 1} cuts, the model marks {len(marks)} (pipe_split, "
            "SplitPoint)",
            hint=("call torch's pipe_split() where to cut" if not marks else f"use -n {len(marks) + 1}")
            + ", or let the planner choose: leave out --cuts given",
        )
    if takes_marks:
        cuts = Cuts((0, *marks, count), (0, *marks, count))
    else:
        cuts = options.cuts if isinstance(options.cuts, Cuts) else _pinned(program.units, options)
    if (cuts.workers, cuts.forward[-1]) != (options.stages, count):
        raise CutError(
            f"the cuts are for {cuts.workers} workers and {cuts.forward[-1]} units, the step for {options.stages} "
            f"and {count}"
        )
    _refuse_parted_buffers(program.units, profile, cuts.forward)
    if not options.recomputes:
        return Choice(cuts)
    priced = of_cuts(profile, setting.workers(options.stages, graph=_graph(profile, cuts, options)), cuts)
    return Choice(cuts, rooms=_rooms(profile, priced, options, setting))


def _rooms(profile: Profile, partition: Partition, options: CompileOptions, setting: Setting) -> tuple[Room, ...]:
    """How much each worker's memory leaves for the values that it keeps between actions."""
    if not options.recomputes:
        return ()
    if options.recompute == "full":
        return (LEAST,) * options.stages
    schedule = setting.schedule_of(options.stages).along(_graph(profile, partition.cuts, options))
    memory = setting.workers(options.stages).memory
    return tuple(
        Room(memory[k] - (load.memory - load.values), moments(schedule, k)) for k, load in enumerate(partition.loads)
    )


def _planned(profile: Profile, options: CompileOptions, setting: Setting) -> tuple[Partition, ...]:
    """The partitions that were compared, the chosen one last."""
    if options.stages > len(profile.units):
        raise CutError(
            f"{options.stages} workers, but the step has only {len(profile.units)} units to share",
            hint=f"use -n {len(profile.units) * options.workers // options.stages} or fewer",
        )
    widest = "bidirectional" if options.cuts == "auto" else str(options.cuts)
    if options.replicas and not options.kind.synchronous and options.cuts == "auto":
        widest = "same"  # other cuts would need copies of weights, which such a run refuses (`fxpipe.policy.recipe`)
    found = planned_side_by_side(profile, setting, options.stages, ("same", widest))
    chosen = found[widest]
    if options.cuts == "auto" and "same" in found:

        def slowest(partition: Partition, links: Links) -> float:
            graph = _graph(profile, partition.cuts, options)
            workers = replace(setting, links=links).workers(options.stages, graph=graph)
            return repriced(profile, workers, partition).bottleneck

        if not worth_messages(chosen, found["same"], slowest, setting.links, profile.noise(options.stages)):
            chosen = found["same"]
    return (*(p for p in found.values() if p is not chosen), chosen)


def _graph(profile: Profile, cuts: Cuts, options: CompileOptions) -> Graph:
    return () if options.replicas else graph_of_cuts(profile, cuts)


def _pinned(units: Sequence[str], options: CompileOptions) -> Cuts:
    asked = (("--fp-cut", options.forward_at), ("--bp-cut", options.backward_at))
    alone = not (options.forward_at and options.backward_at)  # both phases have these cuts
    found = [_positions(units, paths, option, options.stages, alone) for option, paths in asked if paths]
    count = len(units)
    return Cuts((0, *found[0], count), (0, *found[-1], count))


def _positions(units: Sequence[str], paths: Sequence[str], option: str, workers: int, alone: bool) -> list[int]:
    if len(paths) != workers - 1:
        raise CutError(
            f"{workers} workers need {workers - 1} cuts, {option} gives {len(paths)}",
            hint=f"repeat {option} once for each boundary between workers",
        )
    positions = [_position(units, path, option) for path in paths]
    for i, (before, after) in enumerate(zip([0, *positions], positions, strict=False)):
        if after < before or (alone and after == before):
            previous = paths[i - 1] if i else "the first unit"
            raise CutError(
                f"{option} {paths[i]} does not come after {previous}: worker {i} would have nothing to do",
                hint="give the cuts in the order in which the model runs its modules",
            )
    return positions


def _position(units: Sequence[str], path: str, option: str) -> int:
    for i, unit in enumerate(units):
        if unit == path or unit.startswith(path + "."):
            return i
    known = sorted({".".join(u.split(".")[: d + 1]) for u in units for d in range(u.count(".") + 1)} - {""})
    raise CutError(
        f"{option} {path}: no module of that path runs in the forward pass{near(path, known)}",
        hint="paths are those of model.named_modules(); `fxpipe compile` prints where each worker begins",
    )


def marked(program: Program) -> tuple[int, ...]:
    """The units before which the step itself marks cuts; a mark without a unit between it and another counts once."""
    cheap = sources_of(program).cheap
    last: dict[int, int] = {}  # by how many marks come before, the last unit
    for node in program:
        if info(node).phase == "F" and node not in cheap:
            last[info(node).marks] = max(info(node).unit, last.get(info(node).marks, 0))
    ends = itertools.accumulate((last[marks] for marks in sorted(last)), max)
    return tuple(sorted({end + 1 for end in ends} - {len(program.units)}))


def note_on_marks(program: Program, options: CompileOptions) -> str:
    """What becomes of the step's own marks; '' if it has none, or is asked for them."""
    count = len(marked(program))
    if not count or not options.planned:
        return ""
    marks = f"the model marks where torch's own pipeline cuts it (pipe_split, SplitPoint; {count} in all)"
    if options.takes_marks(count):
        return f"{marks}: it is cut there; --cuts bidirectional lets the planner choose"
    return f"{marks}: these are not used; --cuts given -n {count + 1} cuts it there"


def _refuse_parted_buffers(units: Sequence[str], profile: Profile, forward: Iterable[int]) -> None:
    for position in forward:
        if position in profile.uncut:
            raise CutError(
                f"the forward cut before unit {position} ({units[position]}) separates readers of buffer "
                f"{profile.uncut[position]} from the unit that updates it",
                hint="move the cut before or after all modules that use this buffer",
            )
