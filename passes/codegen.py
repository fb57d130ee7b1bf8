"""codegen: write each stage as a Python file that a person can read, debug, edit and run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fxpipe.ir.program import Level, Program, size_of, unit_name
from fxpipe.ir.stage import Stage
from fxpipe.ir.transform import Pass
from fxpipe.ir.wire import codec_of, is_pack, is_unpack, variable
from fxpipe.passes.analysis.function_text import OutlinedText, PartText
from fxpipe.plan.spec import EdgeSpec
from fxpipe.tracing.custom_operators import registering

TOTALS = "totals"
"""The start of the name of the totals file."""


@dataclass(frozen=True)
class Codegen(Pass):
    """Emit a file for every stage, with a function for each of its parts; the header names the `command`."""

    name: ClassVar[str] = "codegen"
    requires: ClassVar[Level] = Level.SPLIT
    provides: ClassVar[Level] = Level.EMITTED

    command: str = "fxpipe.compile(...)"
    file: str = "stage_{worker}.py"

    def __call__(self, program: Program) -> Program:
        edges = {edge.name: edge for edge in program.wires.values()}
        header = _training_header if "B" in program.phases else _evaluation_header
        if self.file.startswith(TOTALS):
            header = _totals_header
        stages = []
        for stage in program.stages:
            again = frozenset(program.again[stage.worker].values) if program.again else frozenset[str]()
            replicas = program.replicas[stage.worker] if program.replicas else 1
            taken = {function.name for function in stage.functions}
            functions: list[OutlinedText | PartText] = [OutlinedText(f, taken, again) for f in stage.functions]
            functions += [PartText(part, edges, taken, again, replicas) for part in stage.parts.values()]
            source = _text(header(program, stage, edges, self.command), functions)
            stages.append(replace(stage, file=self.file.format(worker=stage.worker), source=source))
        return replace(program, level=self.provides, stages=tuple(stages))


def _text(header: Iterator[str], functions: Sequence[OutlinedText | PartText]) -> str:
    """A file: its header, its imports, its functions."""
    modules = registering(function.graph for function in functions)
    imports = [f"import {module}  # defines operators that are called below" for module in modules]
    codecs = _codecs(functions)
    if codecs:
        imports += ["", "from fxpipe.codecs import codec"]
    codec_lines = [f'{variable(text)} = codec("{text}")' for text in codecs]
    lines = [*header, "", "import torch", *imports, "", "aten = torch.ops.aten", *codec_lines]
    for function in functions:
        lines += ["", "", *function.lines()]
    return "\n".join(lines) + "\n"


def _codecs(functions: Sequence[OutlinedText | PartText]) -> list[str]:
    """The codecs that these functions use."""
    nodes = (node for function in functions for node in function.graph.nodes)
    return sorted({codec_of(node) for node in nodes if is_pack(node) or is_unpack(node)})


def _totals_header(program: Program, stage: Stage, edges: dict[str, EdgeSpec], command: str) -> Iterator[str]:
    yield f'"""Totals of a minibatch, on worker 0, made by: {command}'
    yield ""
    yield f"computes  {', '.join(stage.parts['F'].spec.metrics)}"
    yield ""
    yield "Sums over the minibatch that the loss needs, such as the number of tokens that are not padding: computed on"
    yield "each microbatch and added up before the first forward. The stages get the sums with the batch."
    yield '"""'


def _evaluation_header(program: Program, stage: Stage, edges: dict[str, EdgeSpec], command: str) -> Iterator[str]:
    assert program.cuts is not None
    worker, spec = stage.worker, stage.parts["F"].spec
    arriving, leaving = (sum(edges[n].sent.bytes for n in names) for names in (spec.receives, spec.sends))
    yield f'"""Evaluation on worker {worker} of {program.cuts.workers}, made by: {command}'
    yield ""
    yield f"computes  {_units(program, program.cuts.forward[worker : worker + 2])}"
    yield f"metrics   {', '.join(spec.metrics) or 'none'}"
    if spec.updates:
        yield f"carries   after the metrics, to the next batch: {', '.join(spec.updates)}"
    yield f"receives  {arriving:,} bytes a batch"
    yield f"sends     {leaving:,} bytes a batch"
    yield ""
    yield "metrics(model, batch) in eval mode, without gradients. Weights and buffers are the worker's own;"
    yield "what another worker holds is sent here before the first batch of an evaluation."
    yield "It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same."
    yield '"""'


def _training_header(program: Program, stage: Stage, edges: dict[str, EdgeSpec], command: str) -> Iterator[str]:
    assert program.cuts is not None
    worker, workers = stage.worker, program.cuts.workers
    names = {p.names[0]: p for p in program.parameters}
    owned = stage.parts[program.phases[-1]].spec.gradients
    read = dict.fromkeys(name for part in stage.parts.values() for name in part.spec.weights)
    copies = [n for n in read if n not in owned and names[n].trained]
    frozen = [n for n in read if not names[n].trained]
    sizes = {p.names[0]: size_of(program.values[p.node]) for p in program.parameters}
    out = sum(e.sent.bytes for e in edges.values() if e.src == worker)
    arriving = sum(e.sent.bytes for e in edges.values() if e.dst == worker)
    yield f'"""Stage {worker} of {workers}, made by: {command}'
    yield ""
    yield f"forward   {_units(program, program.cuts.forward[worker : worker + 2])}"
    backward, weights = (c[worker : worker + 2] for c in (program.cuts.backward, program.cuts.weights))
    yield f"backward  {_units(program, backward)}"
    if weights != backward or program.weights_apart:
        separate = ", separate from backward" if program.weights_apart else ""
        yield f"weights   gradients of {_units(program, weights)}{separate}"
    for _, *again in (r for r in program.cuts.recompute if r[0] == worker):
        yield f"repeats   forward of {_units(program, again)}"
    if spared := _spared(program, worker):
        yield spared
    yield f"owns      {len(owned)} parameters, {sum(sizes[n] for n in owned):,} bytes"
    if program.replicas and (several := program.replicas[worker]) > 1:
        buckets = len(program.buckets[worker])
        yield f"replicas  {several}: gradients in {buckets} bucket{'s' if buckets != 1 else ''}"
    if copies:
        yield f"copies    {', '.join(copies)}: {sum(sizes[n] for n in copies):,} bytes"
    if frozen:
        yield f"frozen    {len(frozen)} parameters, {sum(sizes[n] for n in frozen):,} bytes"
    if metrics := stage.parts["F"].spec.metrics:
        yield f"metrics   after the loss, in one tensor: {', '.join(metrics)}"
    yield f"receives  {arriving:,} bytes a microbatch"
    yield f"sends     {out:,} bytes a microbatch"
    yield ""
    yield "Weights, buffers and saved values are arguments: what they are is the policy's business, not this file's."
    if stage.functions:
        yield "What repeats is a function, for all modules that its first line names. An edit is for all, in this"
        yield "file; to change one, call a copy for it. Values are given in a list, which it empties to drop them."
    yield "It may be edited: `fxpipe run` warns and runs it, as long as sends, receives and arguments stay the same."
    yield '"""'


def _spared(program: Program, worker: int) -> str:
    """What the worker's backward computes again to save memory, for the header; '' if nothing."""
    if not program.again or not program.again[worker].values:
        return ""
    again = program.again[worker]
    less = f", to save {again.bytes:,} bytes a microbatch less" if again.bytes > 0 else ""
    return f"again     {len(again.values)} values of its own forward{less}"


def _units(program: Program, bounds: Sequence[int]) -> str:
    first, end = bounds
    if first == end:
        return "nothing"
    return f"units {first} to {end - 1}, {unit_name(program.units[first])} to {unit_name(program.units[end - 1])}"
