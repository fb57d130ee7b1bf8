"""`--backend auto`: measures every part of every stage on every engine; takes the fastest that agrees with eager."""

from __future__ import annotations

import dataclasses
import shutil
import statistics
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from fxpipe import engines as backends
from fxpipe.codecs import without_codecs
from fxpipe.costs.timer import Rounds, clock_of, seconds_of
from fxpipe.engines import MEASURED
from fxpipe.engines.attach import ON_ENGINES, check_outputs
from fxpipe.engines.engine import EnginePart
from fxpipe.engines.kept_files import names_of
from fxpipe.errors import BackendError, FxpipeError, first_line
from fxpipe.plan.build_folder import ENGINES as ENGINES_FOLDER
from fxpipe.plan.cost_records import EdgeTiming, EngineTime
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import Phase
from fxpipe.random_state import torch_state_kept
from fxpipe.stages.loaded import load_stages
from fxpipe.stages.microbatch import record_calls
from fxpipe.stages.part_call import Function, PartCall
from fxpipe.stages.pure_function import in_float64
from fxpipe.stages.pure_part import PurePart, trace_stage
from fxpipe.threads import threads as worker_threads

if TYPE_CHECKING:
    from fxpipe.builds.build import Build

BUDGET = 1.0
"""Seconds for which a part is measured on all engines together, after each has run `LEAST` times."""

LEAST, MOST = 3, 50
"""Rounds; in each, every engine runs once, in turn."""

GAIN = 0.97
"""Another engine is taken if its time is less than this fraction of eager's; a smaller gain is noise."""


def choose_engines(
    build: Build,
    leaves: Mapping[str, Any],
    *,
    backend: str = "auto",
    threads: int | None = None,
    budget: float = BUDGET,
    known: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Build:
    """The build with an engine for every part in its plan, the measured times, and the files that engines made.

    Args:
        leaves: the batch leaves of one microbatch by their names.
        backend: 'auto', or an engine for all parts, which is then only checked and timed against eager.
        threads: CPU threads of one worker; by default its share of the cores, as in a run.
        budget: seconds of measuring a part, on all engines together.
        known: what engines made of an earlier build; used if the parts are the same.
        say: is called with the part that is being built and timed.

    Raises:
        BackendError: the engine asked for is not available, cannot run a part, or computes something else.
    """
    plan = build.plan
    names = [n for n in (MEASURED[1:] if backend == "auto" else (backend,)) if n != "eager"]
    times: list[EngineTime] = []
    names_kept: dict[tuple[int, Phase, str], list[str]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="fxpipe_engines_") as temporary,
        worker_threads(threads, plan.processes),
        torch_state_kept(),
        torch.no_grad(),
        without_codecs(),  # an engine does not run them, and they turn a rounding error into a whole quantization step
    ):
        cache = Path(temporary) / ENGINES_FOLDER
        if known is not None and known.is_dir():
            shutil.copytree(known, cache)
        stages = load_stages(plan, build.files)
        calls = record_calls(plan, stages, build.tensors, leaves)
        there = {n: backends.make(n).missing(plan.device) for n in names}
        absent = [reason for reason in there.values() if reason]
        if absent and backend != "auto":
            raise BackendError("; ".join(absent), hint="--backend auto takes what is available")
        for worker, stage in enumerate(stages):
            try:
                parts = trace_stage(plan, worker, stage, ON_ENGINES)
            except BackendError as error:
                if backend != "auto":
                    raise
                reasons = {n: there[n] or _line(error) for n in names}
                times += [EngineTime(worker, phase, n, reason=reasons[n]) for phase in ON_ENGINES for n in names]
                continue
            for part in parts:
                say(f"{part.name} on {', '.join(n for n in names if not there[n])}")
                call, emitted = calls[worker, part.phase], stage.functions[part.phase]
                trial = _EngineTrial(part, emitted, call, cache, backend != "auto", budget)
                found, kept = trial.times(there)
                times += found
                names_kept |= {(worker, part.phase, engine): name for engine, name in kept.items()}
        files = {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}
    if backend == "auto":
        times = _fastest(times)
    else:
        times = [dataclasses.replace(t, chosen=t.engine == backend) for t in times]
    plan = _with_engines(plan, times)
    return dataclasses.replace(
        build,
        plan=plan,
        costs=dataclasses.replace(
            build.costs, timings=tuple(_as_whole(plan, build.costs.timings)), engines=tuple(times)
        ),
        engine_files=_chosen(
            files, {n for t in times if t.chosen for n in names_kept.get((t.worker, t.phase, t.engine), ())}
        ),
    )


def _fastest(times: Sequence[EngineTime]) -> list[EngineTime]:
    """The rows, with one engine marked for each part: the fastest that gains, or eager if none does."""
    gaining = [(t.ratio, t) for t in times if t.engine != "eager" and t.ratio is not None and t.ratio < GAIN]
    best: dict[str, str] = {}
    for _, row in sorted(gaining, key=lambda pair: pair[0]):
        best.setdefault(row.part, row.engine)
    return [dataclasses.replace(t, chosen=best.get(t.part, "eager") == t.engine) for t in times]


def _with_engines(plan: Plan, times: Sequence[EngineTime]) -> Plan:
    chosen = {(t.worker, t.phase): t.engine for t in times if t.chosen}
    stages = tuple(
        dataclasses.replace(s, engines=(chosen.get((k, "F"), "eager"), chosen.get((k, "B"), "eager")))
        for k, s in enumerate(plan.stages)
    )
    return plan.with_step(stages=stages)


def _as_whole(plan: Plan, timings: Sequence[EdgeTiming]) -> Iterator[EdgeTiming]:
    """The timings if an engine receives everything before a part starts, and sends everything after it ends."""
    edges = {e.name: e for e in plan.edges}

    def on_engine(worker: int, phase: Phase) -> bool:
        return plan.stages[worker].engine(phase) != "eager"

    for timing in timings:
        edge = edges[timing.name]
        made = 1.0 if on_engine(edge.src, edge.src_phase) else timing.made
        needed = 0.0 if on_engine(edge.dst, edge.dst_phase) else timing.needed
        yield dataclasses.replace(timing, made=made, needed=needed)


def _chosen(files: Mapping[str, bytes], names: set[str]) -> dict[str, bytes]:
    """The files of the chosen engines: each has its own file or folder, and its digest."""
    wanted = {entry for name in names for entry in names_of(name)}
    return {path: content for path, content in files.items() if path.partition("/")[0] in wanted}


@dataclass(frozen=True)
class _EngineTrial:
    """One part on all engines; one that fails is an error if `strict`, else it is left out."""

    part: PurePart
    emitted: Function
    call: PartCall
    cache: Path
    strict: bool
    budget: float

    def times(self, there: Mapping[str, str | None]) -> tuple[list[EngineTime], dict[str, list[str]]]:
        """A row for eager and one for each engine, and the names of the engines' kept files."""
        part = self.part
        rows, ready = {}, {}
        for name, reason in there.items():
            try:
                if reason:
                    raise BackendError(reason)
                begin = perf_counter()
                made = EnginePart(part, backends.make(name), self.cache)
                seconds = perf_counter() - begin
                error = self._check(made)
            except BackendError as problem:
                if self.strict:
                    raise
                rows[name] = EngineTime(part.worker, part.phase, name, reason=_line(problem))
                continue
            rows[name] = EngineTime(part.worker, part.phase, name, error=error, build=seconds)
            ready[name] = made
        spans = self._measure({"eager": self.emitted, **ready})
        base = spans["eager"]
        found = [EngineTime(part.worker, part.phase, "eager", statistics.median(base), 1.0, 0.0)]
        for name, row in rows.items():
            if name in spans:
                ratio = statistics.median(mine / eager for mine, eager in zip(spans[name], base, strict=True))
                row = dataclasses.replace(row, seconds=statistics.median(spans[name]), ratio=ratio)
            found.append(row)
        return found, {name: made.kept for name, made in ready.items()}

    def _check(self, made: EnginePart) -> float:
        """The engine's largest error. Raises BackendError if it is too large, or the engine fails when it runs."""
        expected = self.call.run(made.judge(self.emitted), seed=0).flat()
        try:
            found = self.call.run(made, seed=0).flat()
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            raise BackendError(f"{made.engine} fails when it runs: {text}") from error
        exact = made.judge(in_float64(self.part))
        return check_outputs(made, expected, found, lambda: self.call.run(exact, seed=0).flat())

    def _measure(self, functions: Mapping[str, Function]) -> dict[str, list[float]]:
        """Seconds of every call, engines in turn; the first round warms up."""
        spans: dict[str, list[float]] = {name: [] for name in functions}
        most = LEAST if len(functions) == 1 else MOST  # a single engine is not compared
        clock = clock_of(self.part.device)
        for measured in Rounds(self.budget, LEAST, most, warm=1).run():
            for name, function in functions.items():
                span = seconds_of(partial(self.call.run, function), clock)
                if measured:
                    spans[name].append(span)
        return spans


def _line(error: FxpipeError) -> str:
    text = textwrap.shorten(error.what, 300, placeholder=" …")
    return f"{text} ({error.where})" if error.where else text
