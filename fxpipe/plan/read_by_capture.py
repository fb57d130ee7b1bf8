"""Which parts of a user's files the capture of a step can have read, from their text alone: nothing is imported.

A part is a statement at the top of a file. One that only binds names (a def, a class, an import, `X = 3`) counts if a
captured hook mentions the name, or another part that counts does. All other statements count: their effects are
unknown. So does a function that changes something that it does not own, and one that mentions something changeable
that counts: it may have run before the capture. In doubt, a part counts.
"""

from __future__ import annotations

import ast
import hashlib
import symtable
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

CAPTURED = {
    *("model", "loss", "metrics", "loss_weight", "reset"),
    *("microbatch_dims", "pad", "pad_to", "constant_batch", "compile_options", "run_options"),
}
"""The hooks from which a build is made. Of data, optimizer and callbacks it has only what a run compares."""

SETTING = "setting"
"""The function that reads a setting: `fxpipe.setting`."""

_PARSE = {"parse_args", "parse_known_args", "argv"}
_KNOWN = {"torch", "numpy", "fxpipe"} | sys.stdlib_module_names
"""Packages whose import changes nothing else."""

_QUIET = {"int", "float", "str", "bool", "len", "abs", "round", "range", "Path", "device", "read_text", SETTING}
"""Calls that change nothing, and whose results cannot be changed."""

_DECORATORS = {
    "no_grad",
    "inference_mode",
    "dataclass",
    "staticmethod",
    "classmethod",
    "property",
    "cache",
    "lru_cache",
}
_REFLECTION = {"globals", "exec", "eval", "__import__"}, {"import_module", "getmembers", "__subclasses__"}
"""Functions and attributes by which code finds a part without its name."""

_REACHES_OUT = {"setattr", "delattr", "__setattr__"}, {"environ", "putenv", "backends", "__class__", "__dict__"}
"""Functions and attributes by which a function changes something that it does not own."""

_ADAPTERS = "fxpipe.adapters"
_OF_HOOKS = {"data", "train_dataset", "eval_dataset", "callbacks"}
"""Their arguments for hooks that are not captured."""

_REGISTERS = {"fxpipe.policy.register", "fxpipe.observe.logger.register"}
"""Decorators of classes that a run finds by their name, and no capture."""

_ARGUMENTS = "TrainingArguments"
_OF_OPTIMIZER = {
    *("learning_rate", "weight_decay", "optim", "adam_beta1", "adam_beta2", "adam_epsilon"),
    *("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
}
"""The fields of transformers' `TrainingArguments` only for the optimizer and its scheduler."""

_OTHERS = "top level"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class ReadByCapture:
    """What the capture of a step can have read.

    Attributes:
        parts: the digest of each, by file and name, as `model.py: Net`; for a file that is not imported by an import
            statement, the file's digest.
        files: all files examined, by their path from the model file's folder.
        settings: the settings that the files name, each with the part that counts and names it, or ''.
        any_setting: a part that counts and reads settings without naming them in its text; '' if there is none.
        arguments: the parsed arguments that parts that count mention, as `model.py: args.width`.
        any_argument: a part that counts and reads the command line in another way; '' if there is none.
        lines: the first and the last line of each part that counts, by file.
        unnamed: whether any part, or a file that counts as a whole, may read settings of any name.
    """

    parts: dict[str, str]
    files: tuple[str, ...]
    settings: dict[str, str]
    any_setting: str = ""
    arguments: tuple[str, ...] = ()
    any_argument: str = ""
    lines: dict[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    unnamed: bool = False

    def has(self, line: str) -> bool:
        """Whether a line, as `model.py:12`, is in a part that counts, or in none of these files."""
        name, _, number = line.rpartition(":")
        inside = [spans for file, spans in self.lines.items() if Path(file).name == name]
        return not inside or any(a <= int(number) <= b for spans in inside for a, b in spans)


@dataclass(eq=False)
class _Statement:
    """A statement.

    Attributes:
        names: the names that it mentions, or binds inside; `dotted` are those only mentioned as `x.y`.
        attributes: all names after a dot.
        imports: the user's own files that it imports, each with the name that it takes from it (None: any) and the name
            that it has here ('': imported inside a function).
        quiet: whether it only binds names.
        fixed: what it binds cannot be changed.
        leads_on: what it binds is not a value, but refers to what it mentions: a function, a class, an import.
        calls: the function whose result is everything that it binds.
        arguments: it binds the parsed command line.
        lines: the first and the last line.
    """

    file: str
    name: str
    text: str
    binds: set[str]
    names: set[str] = field(default_factory=set)
    dotted: set[tuple[str, str]] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    imports: list[tuple[str, str | None, str]] = field(default_factory=list)
    settings: set[str] = field(default_factory=set)
    any_setting: bool = False
    quiet: bool = False
    fixed: bool = False
    leads_on: bool = True
    calls: str = ""
    arguments: bool = False
    lines: tuple[int, int] = (0, 0)

    @property
    def label(self) -> str:
        return f"{self.file}: {self.name}"

    @property
    def mentions(self) -> set[str]:
        return self.names | {name for name, _ in self.dotted}

    def has(self, words: tuple[set[str], set[str]]) -> bool:
        """Whether it mentions one of these functions or attributes."""
        return bool(words[0] & self.names or words[1] & (self.attributes | self.names))


def read_by_capture(path: Path, imported: Iterable[str] = (), called: str = "") -> ReadByCapture:
    """What the capture of a model file can have read.

    Args:
        imported: files that were imported, by their path from its folder; a file that no import statement names counts
            as a whole.
        called: the name of the model file when it was compiled, if it has another one now.

    Raises:
        SyntaxError, ValueError, OSError: a file is not Python, or cannot be read.
    """
    root, model_name = path.resolve().parent, path.name
    files = _files(root, model_name, whole=False)
    every = [part for parts in files.values() for part in parts]
    if any(part.attributes & _OF_OPTIMIZER or part.names & {"train_data", "eval_data"} for part in every):
        files = _files(root, model_name, whole=True)  # some part reads what was left out
        every = [part for parts in files.values() for part in parts]
    makers = _find_arguments(files)
    counted = _counted(files, model_name)
    texts = {f"{called or model_name}: eval_data": [str(any("eval_data" in part.binds for part in files[model_name]))]}
    for part in every:
        if part in counted:
            label = f"{called}: {part.name}" if called and part.file == model_name else part.label
            texts.setdefault(label, []).append(part.text)
    whole = [file for file in imported if file not in files and (root / file).is_file()]
    inside = [part for part in every if part in counted and not part.arguments and part not in makers]
    return ReadByCapture(
        parts={label: _digest("\n".join(text).encode()) for label, text in texts.items()}
        | {file: _digest((root / file).read_bytes()) for file in whole},
        files=tuple(sorted({*files, *whole})),
        settings={
            name: next((part.label for part in every if part in counted and name in part.settings), "")
            for name in sorted({name for part in every for name in part.settings})
        },
        any_setting=next((part.label for part in every if part in counted and part.any_setting), ""),
        arguments=tuple(sorted({label for part in inside for label in _arguments(files, part)})),
        any_argument=next(
            (part.label for part in inside if part.has((_PARSE, _PARSE)) or _mentioned(files, part) & makers), ""
        ),
        lines={file: tuple(part.lines for part in parts if part in counted) for file, parts in files.items()},
        unnamed=bool(whole) or any(part.any_setting for part in every),
    )


def _files(root: Path, model_name: str, whole: bool) -> dict[str, list[_Statement]]:
    """The parts of a file and of all the user's files that it imports.

    Args:
        whole: with the adapters' arguments for hooks that are not captured.
    """
    files: dict[str, list[_Statement]] = {}
    waiting = [model_name]
    while waiting:
        file = waiting.pop()
        if file not in files:
            files[file] = list(_parts(root, file, whole))
            waiting += [target for part in files[file] for target, _, _ in part.imports]
    return files


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _counted(files: dict[str, list[_Statement]], model_name: str) -> set[_Statement]:
    """The parts that count."""
    every = [part for parts in files.values() for part in parts]
    counted = {part for part in every if not part.quiet or (part.file == model_name and part.binds & CAPTURED)}
    mentioned = {part: _mentioned(files, part) for part in every}
    changeable: set[_Statement] = set()
    size = -1
    while size != (size := len(counted) + len(changeable)):
        if any(part.has(_REFLECTION) for part in counted):
            return set(every)
        for part in list(counted):
            counted |= mentioned[part]
        changeable |= {p for p in counted if not p.fixed or (p.leads_on and mentioned[p] & changeable)}
        for part in every:
            bare = {other for other in mentioned[part] if other.arguments and other.binds & part.names}
            if mentioned[part] & changeable or bare & counted:
                counted.add(part)
    return counted


def _mentioned(files: dict[str, list[_Statement]], part: _Statement) -> set[_Statement]:
    """The other parts that bind names that a part mentions."""
    others = {other for other in files[part.file] if other.binds & part.mentions or "*" in other.binds}
    for file, name, local in part.imports:
        if not local or local in part.binds:
            others.update([other for other in files[file] if name in other.binds] or files[file])
    return others - {part}


def _find_arguments(files: dict[str, list[_Statement]]) -> set[_Statement]:
    """Mark the parts that bind the parsed command line; returns the functions that parse it for them."""
    makers: set[_Statement] = set()
    for part in (part for parts in files.values() for part in parts if part.calls):
        parsers = [other for other in files[part.file] if part.calls in other.binds and _PARSE & other.attributes]
        if part.calls == "parse_args" or parsers:
            part.arguments = part.quiet = part.fixed = True
            makers.update(parsers)
    return makers


def _arguments(files: dict[str, list[_Statement]], part: _Statement) -> Iterator[str]:
    """The parsed arguments that a part mentions, with the file that parses them."""
    for other in (other for other in _mentioned(files, part) if other.arguments):
        attributes = {attribute for name, attribute in part.dotted if name in other.binds}
        if other.binds & part.names or not attributes:  # all of them, or an import of them
            yield other.label
        yield from (f"{other.label}.{attribute}" for attribute in attributes)


class _WithoutUncaptured(ast.NodeTransformer):
    """Leaves out what registers classes that are not captured, and arguments of the adapters for hooks that are not
    captured; then their hooks, at the top of the model file, are not names that code computes.

    Args:
        whole: leave the adapters' arguments.
    """

    def __init__(self, tree: ast.Module, whole: bool) -> None:
        self._whole = whole
        bound = Counter(name for statement in tree.body for name in _bound_in(statement))
        self._imported = {
            _local(alias): f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            for node in tree.body
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
            if bound[_local(alias)] == 1
        }
        calls = [n for n in tree.body if isinstance(n, ast.Assign) and self._makes_hooks(n.value)]
        self._hooks = {name for n in calls for name in _bound_in(n) if bound[name] == 1}

    def _path(self, value: ast.expr) -> str:
        """What a name that was imported is called in its package: `fxpipe.policy.register`."""
        first, dot, path = ast.unparse(value).partition(".")
        return self._imported.get(first, "") + dot + path

    def _makes_hooks(self, value: ast.expr) -> bool:
        path = self._path(value.func) if isinstance(value, ast.Call) and not self._whole else ""
        return path.startswith(_ADAPTERS) and path.endswith("_hooks")

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = [name for name in node.decorator_list if self._path(name) not in _REGISTERS]
        return self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "globals().update" and len(call.args) == 1:
            argument = call.args[0]
            if not call.keywords and (self._makes_hooks(argument) or ast.unparse(argument) in self._hooks):
                node.value = argument
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        left_out = _OF_HOOKS if self._makes_hooks(node) else set()
        if _called(node) == _ARGUMENTS and not self._whole:
            left_out = _OF_OPTIMIZER
        node.keywords = [keyword for keyword in node.keywords if keyword.arg not in left_out]
        return self.generic_visit(node)


def _parts(root: Path, file: str, whole: bool) -> Iterator[_Statement]:
    tree = ast.parse((root / file).read_bytes(), filename=file)
    _WithoutUncaptured(tree, whole).visit(tree)
    fixed: dict[str, bool] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test) == _AS_SCRIPT:
            continue
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            yield from (_import(root, file, statement, alias) for alias in statement.names)
            continue
        part = _statement(root, file, statement, fixed)
        fixed |= {name: fixed.get(name, True) and part.fixed for name in part.binds}
        yield part


_AS_SCRIPT = "__name__ == '__main__'"


def _statement(root: Path, file: str, statement: ast.stmt, fixed: dict[str, bool]) -> _Statement:
    binds = {statement.name} if isinstance(statement, Definition) else _bound_in(statement)
    part = _Statement(file, ", ".join(sorted(binds)) or _OTHERS, ast.unparse(statement), binds)
    part.lines = statement.lineno, statement.end_lineno or statement.lineno
    _look(root, part, statement)
    if isinstance(statement, Definition):
        part.quiet = _quiet_definition(statement)
        part.fixed = part.quiet and not _keeps(statement, fixed)
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        plain = all(isinstance(n, (ast.Name, ast.Tuple, ast.expr_context)) for t in targets for n in ast.walk(t))
        part.quiet = plain and _quiet(statement.value)
        part.fixed, part.leads_on = plain and _fixed(statement.value, fixed), False
        if plain and isinstance(targets[0], ast.Name) and isinstance(statement.value, ast.Call):
            part.calls = _called(statement.value)
    return part


def _bound_in(statement: ast.stmt) -> set[str]:
    """The names that a statement binds, at any depth."""
    inner = list(ast.walk(statement))
    names = {n.id for n in inner if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {n.name for n in inner if isinstance(n, Definition)}
    return names | {_local(n) for n in inner if isinstance(n, ast.alias)}


def _local(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]


def _look(root: Path, part: _Statement, statement: ast.stmt) -> None:
    """Note what a statement mentions, imports and reads, at any depth."""
    nodes = list(ast.walk(statement))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    before_dot = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    for node in nodes:
        if isinstance(node, ast.Attribute):
            part.attributes.add(node.attr)
            if isinstance(node.value, ast.Name):
                part.dotted.add((node.value.id, node.attr))
        elif isinstance(node, ast.Name) and id(node) not in before_dot:
            part.names.add(node.id)
        elif isinstance(node, ast.Global):
            part.names |= set(node.names)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                part.imports += [(file, name, "") for file, name, _ in _imported(root, part.file, node, alias)]
                part.attributes |= {*alias.name.split("."), *(getattr(node, "module", None) or "").split(".")}
    global_names = _globals(symtable.symtable(part.text, part.file, "exec"))
    part.names &= global_names
    part.dotted = {(name, attribute) for name, attribute in part.dotted if name in global_names}
    if ("sys", "modules") in part.dotted or any(_called(c) in ("vars", "locals") and not c.args for c in calls):
        part.names.add("globals")  # at the top of a file, locals are globals
    read = [call for call in calls if _called(call) == SETTING]
    names = [call.args[0] if call.args else None for call in read]
    part.settings = {n.value for n in names if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    mentioned = [n for n in nodes if SETTING in (getattr(n, "id", ""), getattr(n, "attr", ""))]
    part.any_setting = len(part.settings) < len({ast.unparse(n) for n in names if n}) or len(mentioned) > len(read)


def _globals(scope: symtable.SymbolTable) -> set[str]:
    """The names of a file that a scope, or one in it, reads or binds."""
    names = {s.get_name() for s in scope.get_symbols() if s.is_global() or scope.get_type() == "module"}
    return names.union(*map(_globals, scope.get_children()))


def _import(root: Path, file: str, statement: ast.Import | ast.ImportFrom, alias: ast.alias) -> _Statement:
    """The effect of an import statement for one of its names."""
    local, module = _local(alias), alias.name if isinstance(statement, ast.Import) else statement.module or ""
    text = f"import {module} {getattr(statement, 'level', 0)} {alias.name} as {local}"
    part = _Statement(file, local, text, {local}, imports=_imported(root, file, statement, alias))
    part.quiet = alias.name != "*" and (module.partition(".")[0] in _KNOWN or bool(part.imports))
    part.fixed = True
    return part


def _imported(
    root: Path, file: str, statement: ast.Import | ast.ImportFrom, alias: ast.alias
) -> list[tuple[str, str | None, str]]:
    """The user's own files that an import runs: each with the name that it takes from it, and the name it has here."""
    local, base = _local(alias), Path()
    if isinstance(statement, ast.Import):
        module, name = alias.name, None
    else:
        module, name = statement.module or "", None if alias.name == "*" else alias.name
        base = Path(file).parents[statement.level - 1] if 0 < statement.level <= len(Path(file).parents) else base
    steps = [*base.parts, *module.split(".")] if module else list(base.parts)
    targets = [(steps[: i + 1], name if i + 1 == len(steps) else None) for i in range(len(steps))]
    targets += [] if name is None else [([*steps, name], None)]
    return [(target, taken, local) for path, taken in targets if (target := _file(root, path))]


def _file(root: Path, steps: list[str]) -> str:
    candidates = (f"{'/'.join(steps)}{ending}" for ending in (".py", "/__init__.py"))
    return next((name for name in candidates if (root / name).is_file()), "")


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def _quiet(value: ast.expr | None) -> bool:
    """Whether computing a value changes nothing: it calls only functions known to change nothing."""
    nodes = [] if value is None else list(ast.walk(value))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    return all(_called(call) in _QUIET for call in calls) and not any(isinstance(n, ast.NamedExpr) for n in nodes)


def _fixed(value: ast.expr | None, fixed_names: dict[str, bool]) -> bool:
    """Whether a value cannot be changed, judged by its text."""
    if isinstance(value, ast.Call):
        return _called(value) in _QUIET
    if isinstance(value, ast.Name):
        return fixed_names.get(value.id, False)
    if isinstance(value, ast.Attribute):
        return ast.unparse(value).startswith(("torch.", "math.")) or (
            value.attr == "parent" and _fixed(value.value, fixed_names)
        )
    if isinstance(value, (ast.Tuple, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.IfExp)):
        return all(_fixed(n, fixed_names) for n in ast.iter_child_nodes(value) if isinstance(n, ast.expr))
    return value is None or isinstance(value, (ast.Constant, ast.JoinedStr, ast.Compare))


def _quiet_definition(node: Definition) -> bool:
    """Whether a definition only binds its name, and its code visibly changes only what it owns."""
    made_by = {ast.unparse(d.func if isinstance(d, ast.Call) else d).rpartition(".")[2] for d in node.decorator_list}
    if not made_by <= _DECORATORS:
        return False
    if isinstance(node, ast.ClassDef):
        return not node.keywords and all(map(_quiet, node.bases)) and all(map(_quiet_in_class, node.body))
    defaults = (*node.args.defaults, *node.args.kw_defaults)
    return node.name != "__init_subclass__" and all(map(_quiet, defaults)) and not _reaches_out(node)


def _quiet_in_class(statement: ast.stmt) -> bool:
    if isinstance(statement, Definition):
        return _quiet_definition(statement)
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        return _quiet(statement.value)
    return isinstance(statement, ast.Pass) or (
        isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    )


def _reaches_out(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function may change something that it does not own, judged by its text."""
    nodes = list(ast.walk(function))
    local = {n.arg for n in nodes if isinstance(n, ast.arg)} - {"cls"}
    local |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Global) or (isinstance(node, ast.Name) and node.id in _REACHES_OUT[0]):
            return True
        if isinstance(node, ast.Attribute) and (node.attr in _REACHES_OUT[1] or node.attr.startswith("set_default")):
            return True
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            whose: ast.expr = node
            while isinstance(whose, (ast.Attribute, ast.Subscript)):
                whose = whose.value
            if not (isinstance(whose, ast.Name) and whose.id in local):
                return True
    return False


def _keeps(definition: Definition, fixed_names: dict[str, bool]) -> bool:
    """Whether a definition has something changeable that lasts: a cache, a default, an attribute of a class."""
    for node in (n for n in ast.walk(definition) if isinstance(n, Definition)):
        if any("cache" in ast.unparse(decorator) for decorator in node.decorator_list):
            return True
        if isinstance(node, ast.ClassDef):
            values = [s.value for s in node.body if isinstance(s, (ast.Assign, ast.AnnAssign))]
        else:
            values = [*node.args.defaults, *node.args.kw_defaults]
        if not all(_fixed(value, fixed_names) for value in values):
            return True
    return False
