"""docs/layout.md names every room in order, a room imports only rooms above it, and rooms keep their budgets."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from house import Counts, budgets, counted, exceeded, idle, lowered, product

ROOT = Path(__file__).parent.parent
PACKAGES = {"fxpipe": "fxpipe", "passes": "fxpipe.passes", "cli": "fxpipe.cli"}  # folder: name by which it is imported
NAMES = {"fxpipe", "fxpipe.__main__"}
"""May import rooms below them: the lazy public names, and `python -m fxpipe`."""
BELOW = ("fxpipe.runtime.process.new_shapes", "fxpipe.lowering.new_shape", "folder_with_new_shape")
"""The one import from a room below: a run compiles a shape of batch that it meets. Nobody can hand that in. A compile
returns builds, and builds start runs, so lowering is below; and a worker's process begins in the runtime."""
TORCHS = "fxpipe.torch_private"
OTHERS = {"_fields", "_replace", "_get_c_device", "_iobinding", "_ortvalue", "_trainer"}
"""Private by their names, but not of torch: of named tuples, of onnxruntime, of Lightning."""
PATH = re.compile(r"`((?:fxpipe|passes|cli|tests|zoo|examples|benchmarks|docs)/[\w./]*)`")
ROOM = re.compile(r"^- `((?:fxpipe|passes|cli)/(?:\w+/)?)`:", re.MULTILINE)
LAYOUT = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")


def modules() -> dict[str, Path]:
    """Every module of the three packages by its installed name."""
    found = {}
    for folder, name in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((name, *(p for p in parts if p != "__init__")))] = path
    return found


def rooms() -> list[str]:
    """The rooms in the order of layout.md, by their installed names; `fxpipe` is the first."""
    return [PACKAGES[top] + ("." + rest if rest else "") for top, _, rest in (r[:-1].partition("/") for r in _listed())]


def _listed() -> list[str]:
    return ROOM.findall(LAYOUT)


def room_of(module: str, listed: list[str]) -> int:
    """The number of the module's room; files directly in `fxpipe/` are in the first."""
    parts = module.split(".")
    return listed.index(".".join(parts[:2])) if ".".join(parts[:2]) in listed else 0


def imports(source: str) -> Iterator[str]:
    """Every module that the source imports, inside functions and for types too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from (f"{base}.{name.name}" for name in node.names)


def offences(module: str, source: str, listed: list[str]) -> list[str]:
    """Each import of a module that goes to a room below its own, or does not use the installed name."""
    found = []
    for imported in imports(source):
        top = imported.split(".")[0]
        if top in ("", "passes", "cli"):
            found.append(f"{module} imports {imported}, which is not its installed name")
        elif module in NAMES or (module, imported) == (BELOW[0], ".".join(BELOW[1:])):
            continue
        elif top == "fxpipe" and room_of(imported, listed) > room_of(module, listed):
            found.append(f"{module} imports {imported}, from a room below its own")
    return found


def private_of_torch(source: str) -> Iterator[str]:
    """Each private name that the source takes from torch, or of an object that may be torch's: one it does not define.

    Operators (`aten._to_copy`) are no private names, nor are those of modules that are not torch's (`os._exit`).
    """
    nodes = list(ast.walk(ast.parse(source)))
    imported = {  # the module that each name comes from
        name.asname or name.name.split(".")[0]: node.module or "" if isinstance(node, ast.ImportFrom) else name.name
        for node in nodes
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    mine = OTHERS | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    mine |= {a.attr for a in attributes if isinstance(a.value, ast.Name) and a.value.id == "self"}
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [p for name in imports(ast.unparse(node)) if name.startswith("torch.") for p in name.split(".")]
        elif isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.keyword):
            names = [node.arg or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("attr", "attrgetter", "methodcaller")):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        elif isinstance(node, ast.Constant) and str(node.value).startswith("torch._"):
            names = str(node.value).split(".")
        if not any(re.match("_(?!_|$)", name) and name not in mine for name in names):
            continue
        owner, _, _ = ast.unparse(node).rpartition(".")
        operator = isinstance(node, ast.Attribute) and owner in ("aten", "torch.ops.aten", "self", "super()")
        if not operator and imported.get(owner.split(".")[0], "torch").startswith(("torch", TORCHS)):
            yield ast.unparse(node)


def test_what_is_private_of_torch_is_named_in_one_room() -> None:
    every = {module: path.read_text("utf-8") for module, path in modules().items() if not module.startswith(TORCHS)}
    assert [f"{module}: {text}" for module, source in every.items() for text in private_of_torch(source)] == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._inductor.config",
        "from torch.utils import _pytree as pytree",
        "import torch\ntorch._foreach_add_([], [])",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from fxpipe.torch_private import pytree\npytree._register_namedtuple",
        "node.target._schema.arguments",
        "aten.add.Tensor._schema",
        "getattr(target, '_opname', '')",
        "logging.getLogger('torch._dynamo')",
        "make_fx(f, _allow_non_fake_inputs=True)",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_of_torch(source))


def test_a_room_imports_only_rooms_above_it() -> None:
    listed = rooms()
    found = [o for module, path in modules().items() for o in offences(module, path.read_text("utf-8"), listed)]
    assert found == []


def test_no_circles() -> None:
    """Modules import each other in one direction; what functions import, and types, counts too."""
    every = modules()
    graph = {
        module: {n for name in imports(path.read_text("utf-8")) for n in (name, name.rpartition(".")[0]) if n in every}
        - {module, "fxpipe"}
        for module, path in every.items()
    }
    graph[BELOW[0]].remove(BELOW[1])
    while free := [module for module, needs in graph.items() if not needs & graph.keys()]:
        for module in free:
            del graph[module]
    assert sorted(graph) == []


def test_every_room_is_listed() -> None:
    folders = {f"{f}/" for f in PACKAGES} | {
        f"fxpipe/{p.name}/" for p in (ROOT / "fxpipe").iterdir() if (p / "__init__.py").is_file() and not p.is_symlink()
    }
    assert sorted(_listed()) == sorted(folders)


def test_the_page_is_short_and_its_paths_exist() -> None:
    assert LAYOUT.count("\n") <= 110
    assert sorted(path for path in set(PATH.findall(LAYOUT)) if not (ROOT / path).exists()) == []
    run = re.findall(r"`((?:wires|worker|process)/\w+\.py)`", LAYOUT)
    assert sorted(path for path in set(run) if not (ROOT / "fxpipe" / "runtime" / path).exists()) == []


def test_the_runtime_says_what_is_where() -> None:
    for path in (ROOT / "fxpipe" / "runtime").rglob("__init__.py"):
        named = set(re.findall(r"`([\w/]+\.py)`", path.read_text("utf-8")))
        assert [n for n in named if not ((path.parent / n).exists() or (ROOT / n).exists())] == [], path


def test_every_file_says_what_it_does() -> None:
    assert [m for m, path in modules().items() if not ast.get_docstring(ast.parse(path.read_text("utf-8")))] == []


def test_every_folder_is_a_package_and_those_at_the_top_are_in_fxpipe() -> None:
    folders = {path.parent for path in modules().values()}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []
    assert all((ROOT / name.replace(".", "/")).samefile(ROOT / folder) for folder, name in PACKAGES.items())


@pytest.fixture(scope="module")
def counts() -> Counts:
    return counted(product())


def test_the_product_keeps_its_budgets(counts: Counts) -> None:
    """Over one: remove what the change made dead, or lower another one by as much; see tests/support/house.py."""
    assert exceeded(counts, budgets()) == []


def test_budgets_fall_with_the_product(counts: Counts) -> None:
    """Mended by `python tests/support/house.py lower`."""
    assert idle(counts, budgets()) == []


@pytest.mark.parametrize(
    ("path", "source", "complaint"),
    [
        ("fxpipe/plan/grown.py", "a = 1\n" * 100_000, "lines, fxpipe/plan: 100000, and the budget is "),
        (
            "passes/wide.py",
            f"def wide(self, {', '.join(f'a{n}' for n in range(9))}): pass",
            "arguments, passes/wide.py:wide: 9, and the budget is 8",
        ),
        (
            "cli/large.py",
            f"class Large:\n    def __init__(self): {', '.join(f'self.a{n}' for n in range(16))} = range(16)",
            "attributes, cli/large.py:Large: 16, and the budget is 15",
        ),
        (
            "fxpipe/runtime/worker/weights.py",
            "if feature: use()\n" * 1000,
            "branches, fxpipe/runtime/worker/weights.py: 1000, and the budget is ",
        ),
        ("cli/vague.py", "found = 1\n" * 1000, "names, found: 1000, and the budget is "),
    ],
)
def test_growth_is_noticed(path: str, source: str, complaint: str) -> None:
    assert any(line.startswith(complaint) for line in exceeded(counted({path: source}), budgets()))


def test_docstrings_and_comments_weigh_nothing() -> None:
    source = '"""One.\n\nTwo."""\n\n# three\n\n\ndef f() -> str:\n    """Four."""\n    return """\n    five"""\n'
    assert counted({"cli/f.py": source})["lines"] == {"cli": 3}


def test_a_budget_is_lowered_and_never_raised() -> None:
    text = '# Why.\n[lines]\ncli = 10\npasses = 5\n"fxpipe/gone" = 7\n\n[raised]\n"2026-01-01 cli 3" = "more"\n'
    counts = {"lines": {"cli": 8, "passes": 6}, "attributes": {}, "arguments": {}, "branches": {}, "names": {}}
    assert lowered(text, counts) == text.replace("10", "8").replace('"fxpipe/gone" = 7\n', "")
