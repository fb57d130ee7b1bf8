"""What the product weighs, and what it may: `tests/budgets.toml`.

    python tests/support/house.py           print what is counted, and the budgets
    python tests/support/house.py lower     lower each budget to what is counted

A budget only falls. Whoever has to raise one lowers another by as much in the same commit, or adds a line to the file's
table `raised` that says what users get for it.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILE = ROOT / "tests" / "budgets.toml"
PRODUCT = ("fxpipe", "passes", "cli")
MOST = {"attributes": 15, "arguments": 8}
"""What a class and a function may have without a line of their own in the file."""

BRANCHING = ("executor.py", "update.py", "weights.py")
"""Files of `fxpipe/runtime/worker/` to which each feature would like to add its branch."""

VAGUE = ("asked", "found", "given", "known", "made", "own", "rest", "said", "told")
"""Names of local variables that say that there is something, and not what: a local variable is a noun of the domain."""

OPTIONS = ("recompute", "pad_to")
"""Of compile: what an option costs is the number of files that name it."""

SLACK = 0.01
"""The share of a budget that may be left: above it, the budget has to fall, too."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}

Counts = dict[str, dict[str, int]]


def counted(sources: Mapping[str, str]) -> Counts:
    """The numbers that have a budget, by table and key of the file.

    Args:
        sources: by their paths from the root.
    """
    counts: Counts = {"lines": {}, "attributes": {}, "arguments": {}, "branches": {}, "names": dict.fromkeys(VAGUE, 0)}
    for path, source in sources.items():
        tree = ast.parse(source)
        room = room_of(path)
        counts["lines"][room] = counts["lines"].get(room, 0) + lines_of_code(source, tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                _note(counts, "attributes", f"{path}:{node.name}", len(_attributes(node)))
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                _note(counts, "arguments", f"{path}:{node.name}", len(_arguments(node)))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
                counts["names"][node.id] += 1
        if path.startswith("fxpipe/runtime/worker/") and path.rpartition("/")[2] in BRANCHING:
            counts["branches"][path] = sum(isinstance(node, ast.If | ast.IfExp) for node in ast.walk(tree))
    return counts


def room_of(path: str) -> str:
    """The room of a file, by its path from the root."""
    parts = path.split("/")
    return parts[0] if parts[0] != "fxpipe" or len(parts) == 2 else "/".join(parts[:2])


def lines_of_code(source: str, tree: ast.Module) -> int:
    """Lines with code: no docstrings, no comments, no blank lines."""
    texts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            texts.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - texts)


def product() -> dict[str, str]:
    """The sources of the product by their paths from the root."""
    paths = (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def _attributes(node: ast.ClassDef) -> set[str]:
    """Fields of a record, and what methods set of `self`."""
    fields = {a.target.id for a in node.body if isinstance(a, ast.AnnAssign) and isinstance(a.target, ast.Name)}
    stored = (a for a in ast.walk(node) if isinstance(a, ast.Attribute) and isinstance(a.ctx, ast.Store))
    return fields | {a.attr for a in stored if isinstance(a.value, ast.Name) and a.value.id == "self"}


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    of = node.args
    return [a.arg for a in (*of.posonlyargs, *of.args, *of.kwonlyargs) if a.arg not in ("self", "cls")]


def _note(counts: Counts, table: str, key: str, count: int) -> None:
    """Two of a file with the same name, such as `__init__`, count as the larger one."""
    if count > MOST[table]:
        counts[table][key] = max(count, counts[table].get(key, 0))


def budgets() -> Counts:
    """The tables of the file, without `raised`."""
    return {table: rows for table, rows in tomllib.loads(FILE.read_text("utf-8")).items() if table != "raised"}


def exceeded(counts: Counts, allowed: Counts) -> list[str]:
    """What is over its budget, a line each."""
    return [
        f"{table}, {key}: {count}, and the budget is {budget}"
        for table, rows in counts.items()
        for key, count in rows.items()
        if count > (budget := allowed[table].get(key, MOST.get(table, 0)))
    ]


def idle(counts: Counts, allowed: Counts) -> list[str]:
    """Budgets that could be lower, a line each."""
    return [
        f"{table}, {key}: the budget is {budget}, for {count}"
        for table, rows in allowed.items()
        for key, budget in rows.items()
        if budget - (count := counts[table].get(key, 0)) > SLACK * budget
    ]


def lowered(text: str, counts: Counts) -> str:
    """The text of the file with each number that is above what is counted lowered to that; unused rows are gone."""
    lines, table = [], ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            table = heading[1]
        row = re.fullmatch(r'("?)([^"]+)\1 = (\d+)', line)
        if row and table in counts:
            count = counts[table].get(row[2], 0)
            if count == 0 and table != "names":
                continue
            line = f"{row[1]}{row[2]}{row[1]} = {min(int(row[3]), count)}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main() -> None:
    sources = product()
    counts = counted(sources)
    if sys.argv[1:] == ["lower"]:
        FILE.write_text(lowered(FILE.read_text("utf-8"), counts), "utf-8")
    allowed = budgets()
    for table, rows in counts.items():
        for key in sorted({*rows, *allowed.get(table, {})}):
            print(f"{table:12} {rows.get(key, 0):6} of {allowed.get(table, {}).get(key, 0):6}  {key}")
    files, physical = Counter(map(room_of, sources)), Counter[str]()
    for path, source in sources.items():
        physical[room_of(path)] += source.count("\n")
    tests = sum(path.read_text("utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py"))
    for option in OPTIONS:
        naming = [path for path, source in sources.items() if re.search(option.replace("_", "[_-]"), source)]
        print(f"{len(naming)} files name {option}")
    print(
        f"product {sum(physical.values())} lines, {sum(counts['lines'].values())} of code, {files.total()} files; "
        f"runtime {physical['fxpipe/runtime']} lines, {files['fxpipe/runtime']} files; tests {tests} lines"
    )


if __name__ == "__main__":
    main()
