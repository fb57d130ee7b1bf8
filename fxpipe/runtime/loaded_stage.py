"""Loads one emitted stage and checks that its functions still fit the plan."""

from __future__ import annotations

import ast
import hashlib
import itertools
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from fxpipe.errors import BuildError
from fxpipe.plan import PartSpec, StageSpec

ARGUMENTS = {"forward": 4, "backward": 4}
COMPILE_AGAIN = "undo the edit, or compile the model again: fxpipe compile MODEL -o BUILD"
_serial = itertools.count()


@dataclass(frozen=True)
class LoadedStage:
    """A stage ready to run: its two functions and their engines, its file, and whether someone edited that."""

    path: Path
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    edited: bool
    engines: tuple[str, str] = ("eager", "eager")


def load_stage(path: str | Path, spec: StageSpec) -> LoadedStage:
    """Import an emitted stage under its real file name (tracebacks and debuggers show it); writes no bytecode.

    Raises:
        BuildError: no such file, a syntax error, an error at import, or an interface that differs from the
            plan's; every difference is listed.
    """
    path = Path(path).resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise BuildError(
            f"the stage file cannot be read: {error.strerror}", where=str(path), hint=COMPILE_AGAIN
        ) from error
    try:
        tree = ast.parse(source, str(path))
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise BuildError(f"syntax error: {error.msg}", where=f"{path}:{error.lineno}: {line}") from error
    differences = interface_differences(tree, spec)
    if differences:
        raise BuildError(
            f"{path.name} does not match its plan: " + "; ".join(differences),
            where=str(path),
            hint=COMPILE_AGAIN,
        )
    module = _execute(tree, path)
    return LoadedStage(path, module.forward, module.backward, is_edited(source, spec))


def is_edited(source: bytes, spec: StageSpec) -> bool:
    """Whether someone changed a stage's source since it was emitted."""
    return hashlib.sha256(source).hexdigest() != spec.digest


def stage_line(error: BaseException, path: Path) -> str | None:
    """`build/stage_0.py:41: the line` of the deepest frame of `error` in the stage; None without one."""
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename == str(path):
            found = f"{path}:{frame.lineno}: {frame.line}"
    return found


def _execute(tree: ast.Module, path: Path) -> ModuleType:
    name = f"fxpipe_{path.stem}_{next(_serial)}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        exec(compile(tree, str(path), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise BuildError(
            f"importing the stage raised {type(error).__name__}: {error}",
            where=stage_line(error, path) or str(path),
        ) from error
    return module


def interface_differences(tree: ast.Module, spec: StageSpec) -> list[str]:
    """Each way in which the functions of a stage's file differ from the plan's, in words; empty if they fit."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    found: list[str] = []
    for name, part in (("forward", spec.forward), ("backward", spec.backward)):
        if name not in functions:
            found.append(f"there is no function {name}")
            continue
        found += [f"{name} {text}" for text in _part_differences(functions[name], part, name)]
    return found


def _part_differences(function: ast.FunctionDef, part: PartSpec, name: str) -> list[str]:
    arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args)]
    if len(arguments) != ARGUMENTS[name]:
        third = "batch" if name == "forward" else "saved"
        return [f"takes ({', '.join(arguments)}), not (weights, buffers, {third}, comm)"]
    found: list[str] = []
    for verb, expected in (("recv", part.receives), ("send", part.sends)):
        names = _message_names(function, arguments[3], verb)
        verbs = "receives" if verb == "recv" else "sends"
        missing, extra = sorted(set(expected) - set(names)), sorted(set(names) - set(expected))
        twice = sorted({n for n in names if names.count(n) > 1})
        if missing:
            found.append(f"no longer {verbs} {', '.join(missing)}")
        if extra:
            found.append(f"{verbs} {', '.join(extra)}, which the plan does not know")
        if twice:
            found.append(f"{verbs} {', '.join(twice)} more than once")
    third_names = part.batch if name == "forward" else part.saved
    lengths = zip(arguments[:3], (len(part.weights), len(part.buffers), len(third_names)), strict=True)
    for argument, length in lengths:
        for count in _unpacked(function, argument):
            if count != length:
                found.append(f"unpacks {count} values from {argument}, the plan has {length}")
    return found + _return_differences(function, part, name)


def _message_names(function: ast.FunctionDef, comm: str, verb: str) -> list[str]:
    names = []
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == verb
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == comm
        ):
            first = node.args[0] if node.args else None
            text = isinstance(first, ast.Constant) and isinstance(first.value, str)
            names.append(first.value if text else "a computed name")  # type: ignore[union-attr]
    return names


def _unpacked(function: ast.FunctionDef, argument: str) -> list[int]:
    counts = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == argument:
            for target in node.targets:
                if isinstance(target, ast.Tuple | ast.List) and not any(
                    isinstance(e, ast.Starred) for e in target.elts
                ):
                    counts.append(len(target.elts))
    return counts


def _return_differences(function: ast.FunctionDef, part: PartSpec, name: str) -> list[str]:
    """Only what stands literally in the code; the rest is checked when it runs."""
    found = []
    for node in ast.walk(function):
        if not (isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple)):
            continue
        values = node.value.elts
        if any(isinstance(v, ast.Starred) for v in values):
            continue
        if name == "backward":
            if len(values) != len(part.gradients):
                found.append(f"returns {len(values)} gradients, the plan has {len(part.gradients)}")
            continue
        if len(values) != 3:
            found.append(f"returns {len(values)} values, not (loss, buffers, saved)")
            continue
        for value, length, word in (
            (values[1], len(part.updates), "buffers"),
            (values[2], len(part.saved), "saved values"),
        ):
            literal = isinstance(value, ast.Tuple | ast.List)
            if literal and len(value.elts) != length:  # type: ignore[attr-defined]
                found.append(f"returns {len(value.elts)} {word}, the plan has {length}")  # type: ignore[attr-defined]
    return found
