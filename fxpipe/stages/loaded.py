"""Loads the functions of an emitted source, from a file or from text, and checks that they fit the plan."""

from __future__ import annotations

import ast
import hashlib
import itertools
import linecache
import re
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from fxpipe.errors import BuildError, CodecError, FxpipeError, PeerLost, RunError
from fxpipe.plan.plan import Plan
from fxpipe.plan.spec import PartSpec, Phase, StageSpec, StepSpec

ARGUMENTS = {
    "forward": ("weights", "buffers", "batch", "comm"),
    "backward": ("weights", "buffers", "saved", "comm"),
    "weights": ("weights", "buffers", "deferred", "comm"),
    "evaluate": ("weights", "buffers", "batch", "comm"),
}
COMPILE_AGAIN = "undo the edit, or compile the model again: fxpipe compile MODEL -o BUILD"
_serial = itertools.count()


@dataclass(frozen=True)
class LoadedStage:
    """A stage ready to run: its functions by phase and their engines, its file, and whether the file was edited.

    A stage that does not train has only F.
    """

    path: Path
    functions: Mapping[Phase, Callable[..., Any]]
    edited: bool
    engines: tuple[str, str] = ("eager", "eager")


def load_stage(path: str | Path, spec: StageSpec) -> LoadedStage:
    """Import an emitted stage under its real file name, for tracebacks and debuggers; writes no bytecode.

    Raises:
        BuildError: the file is missing, has a syntax error, fails at import, or its interface differs from the plan's
            (lists all differences).
    """
    path = Path(path).resolve()
    try:
        source = path.read_bytes()
        source.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise BuildError(f"{path.name} cannot be read: {reason}", where=str(path), hint=COMPILE_AGAIN) from error
    return _stage(path, source, spec)


def load_stages(step: Plan | StepSpec, source: Path | Mapping[str, str]) -> list[LoadedStage]:
    """All stages of a build, or of another step of it: from its folder, or from texts by file name, which tracebacks
    show.
    """
    if isinstance(source, Path):
        return [load_stage(source / spec.file, spec) for spec in step.stages]
    folder = Path(f"<build {next(_serial)}>")
    return [_stage_of_text(folder / spec.file, source[spec.file], spec) for spec in step.stages]


def load_stage_text(text: str, spec: StageSpec) -> LoadedStage:
    """A stage without a file; tracebacks still show its text."""
    return _stage_of_text(Path(f"<build {next(_serial)}>") / spec.file, text, spec)


def _stage(path: Path, source: bytes, spec: StageSpec) -> LoadedStage:
    """Execute a source: all are loaded here."""
    named = spec.functions
    parts = {named[phase]: part for phase, part in spec.parts.items()}
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise BuildError(
            f"syntax error: {error.msg}", where=f"{path}:{error.lineno}: {line}", hint=COMPILE_AGAIN
        ) from error
    if differences := _differences(tree, parts):
        raise BuildError(
            f"{path.name} does not match its plan: " + "; ".join(differences), where=str(path), hint=COMPILE_AGAIN
        )
    scope: dict[str, Any] = {"__name__": f"fxpipe_{path.stem}", "__file__": str(path)}
    try:
        exec(compile(tree, str(path), "exec"), scope)  # with operators that installed packages register
    except CodecError as error:
        error.where = stage_line(error, path) or str(path)
        raise
    except Exception as error:
        raise BuildError(
            f"importing the stage raised {type(error).__name__}: {error}",
            where=stage_line(error, path) or str(path),
            hint=COMPILE_AGAIN,
        ) from error
    _refuse_unknown_operators(source, path)
    functions = {phase: scope[name] for phase, name in named.items()}
    return LoadedStage(path, functions, is_edited(source, spec))


def _stage_of_text(path: Path, text: str, spec: StageSpec) -> LoadedStage:
    stage = _stage(path, text.encode(), spec)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    weakref.finalize(stage.functions["F"], linecache.cache.pop, str(path), None)
    return stage


def is_edited(source: bytes, spec: StageSpec) -> bool:
    """Whether the source was changed since it was emitted."""
    return hashlib.sha256(source).hexdigest() != spec.digest


def stage_line(error: BaseException, path: Path) -> str | None:
    """`build/stage_0.py:41: the line` of the deepest frame of `error` in the stage; None if there is none.

    In a function that serves several blocks: `…, for blocks.2`.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    if not frames:
        return None
    callers = (comment_above(path, frame.lineno or 0).partition(" · ")[0] for frame in frames[:-1])
    line = f"{path}:{frames[-1].lineno}: {frames[-1].line}"
    return ", for ".join([line, *filter(None, callers)])


def comment_above(path: Path, line: int) -> str:
    """The comment above a line of a stage, which says where its calls come from; '' if there is none."""
    for above in range(line - 1, 0, -1):
        text = linecache.getline(str(path), above)
        if text.startswith("    # "):
            return text.strip().removeprefix("# ")
        if text.startswith("def "):
            break
    return ""


def _refuse_unknown_operators(source: bytes, path: Path) -> None:
    """Raise BuildError for a call of an operator that is not registered in this process.

    A package that has the name of the operator's library, such as bitsandbytes, registers it when it is imported.
    """
    import torch

    for number, line in enumerate(source.decode().splitlines(), start=1):
        for library, operator in re.findall(r"\btorch\.ops\.(\w+)\.(\w+)\.\w+\(", line):
            if not hasattr(getattr(torch.ops, library), operator):
                with suppress(ImportError, OSError, ValueError):  # the error below says what to do
                    import_module(library)
            if not hasattr(getattr(torch.ops, library), operator):
                raise BuildError(
                    f"the stage calls the operator {library}::{operator}, which is not registered in this process",
                    where=f"{path}:{number}: {line.strip()}",
                    hint="import what registers it at the top of model.py: workers import that file, but do not "
                    "call model(); with the Python API, import it before the build is run",
                )


def _differences(tree: ast.Module, parts: Mapping[str, PartSpec]) -> list[str]:
    """The differences between a file's functions and the plan, in words; empty if they fit."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    differences: list[str] = []
    for name, part in parts.items():
        if name not in functions:
            differences.append(f"there is no function {name}")
            continue
        differences += [f"{name} {text}" for text in _part_differences(functions[name], part, name)]
    return differences


def _part_differences(function: ast.FunctionDef, part: PartSpec, name: str) -> list[str]:
    arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if len(arguments) != len(ARGUMENTS[name]):
        return [f"takes ({', '.join(arguments)}), not ({', '.join(ARGUMENTS[name])})"]
    differences: list[str] = []
    nodes = list(ast.walk(function))
    for verbs, calls, expected in (
        ("receives", ("recv",), part.receives),
        ("sends", ("send",), part.sends),
        ("hands over", ("all_reduce", "reduce_scatter"), part.reduces),
    ):
        names = _message_names(nodes, arguments[3], calls)
        missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
        twice = sorted({n for n in names if names.count(n) > 1})
        if missing:
            differences.append(f"no longer {verbs} {', '.join(missing)}")
        if extra:
            differences.append(f"{verbs} {', '.join(extra)}, which the plan does not know")
        if twice:
            differences.append(f"{verbs} {', '.join(twice)} more than once")
    third_names = {"backward": part.saved, "weights": part.deferred}.get(name, part.batch)
    lengths = zip(arguments[:3], (len(part.weights), len(part.buffers), len(third_names)), strict=True)
    for argument, length in lengths:
        for count in _unpacked(nodes, argument):
            if count != length:
                differences.append(f"unpacks {count} values from {argument}, the plan has {length}")
    return differences + _return_differences(nodes, part, name)


def _message_names(nodes: Iterable[ast.AST], comm: str, calls: Collection[str]) -> list[str]:
    names = []
    for node in nodes:
        match node:
            case ast.Call(ast.Attribute(ast.Name(owner), call), args) if owner == comm and call in calls:
                match args:
                    case [ast.Constant(str(name)), *_]:
                        names.append(name)
                    case _:
                        names.append("a computed name")
    return names


def _unpacked(nodes: Iterable[ast.AST], argument: str) -> list[int]:
    counts = []
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == argument:
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and not any(
                    isinstance(e, ast.Starred) for e in target.elts
                ):
                    counts.append(len(target.elts))
    return counts


def _return_differences(nodes: Iterable[ast.AST], part: PartSpec, name: str) -> list[str]:
    """The differences in what the code returns literally; other returns are checked when they run."""
    differences = []
    for node in nodes:
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple | ast.List)):
            continue
        values = node.value.elts
        if any(isinstance(v, ast.Starred) for v in values):
            continue
        if name != "forward":
            evaluated = ("metrics and buffers" if part.updates else "metrics", (*part.metrics, *part.updates))
            of_backward = ("deferred values", part.deferred) if part.deferred else ("gradients", part.gradients)
            word, names = {"backward": of_backward, "weights": ("gradients", part.gradients)}.get(name, evaluated)
            if len(values) != len(names):
                differences.append(f"returns {len(values)} {word}, the plan has {len(names)}")
            continue
        if len(values) != 3:
            differences.append(f"returns {len(values)} values, not (loss, buffers, saved)")
            continue
        for value, length, word in (
            (values[1], len(part.updates), "buffers"),
            (values[2], len(part.saved), "saved values"),
        ):
            if not isinstance(value, ast.Tuple | ast.List) or any(isinstance(v, ast.Starred) for v in value.elts):
                continue
            if len(value.elts) != length:
                differences.append(f"returns {len(value.elts)} {word}, the plan has {length}")
    return differences


IN_A_STAGE = "if the file was edited, undo the edit; else debug it: fxpipe run BUILD --local --steps 1 --out debug/"


@contextmanager
def explained(path: Path, worker: int, what: Callable[[], str], out_of_memory: str) -> Iterator[None]:
    """Turn errors of the emitted code in `path` into RunError with their place; add the place to our own errors.

    Args:
        what: returns what was being done, for the message.
        out_of_memory: the hint if the device has no memory left.
    """
    try:
        yield
    except PeerLost:
        raise
    except FxpipeError as error:
        place = stage_line(error, path)
        error.where = error.where or f"{what()} on worker {worker}" + (f", {place}" if place else "")
        raise
    except Exception as error:
        import torch

        raise RunError(
            f"{what()} failed on worker {worker}: {type(error).__name__}: {error}",
            where=stage_line(error, path) or str(path),
            hint=out_of_memory if isinstance(error, torch.OutOfMemoryError) else IN_A_STAGE,
        ) from error
