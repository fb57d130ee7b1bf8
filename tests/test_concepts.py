"""docs/concepts says what fxpipe does: its tables, grids and pictures are made again here and compared."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

import fxpipe
from fxpipe.plan.cost_records import StageTime
from fxpipe.plan.plan import ParameterSpec
from fxpipe.policy import make as make_policy
from fxpipe.policy import sees
from fxpipe.policy.recipe import choose
from fxpipe.schedule import Versions, grid
from fxpipe.schedule import make as make_schedule
from fxpipe.simulator.scenario import Scenario
from fxpipe.simulator.simulate import simulate
from fxpipe.task.model_file import load_task

DOCS = Path(__file__).parents[1] / "docs"
CONCEPTS, PICTURES = DOCS / "concepts", DOCS / "pictures"
PRINTED = {DOCS / "reference" / "commands.md"}  # by docs/site_pages.py, for the site
PAGES = sorted(DOCS.rglob("*.md"))


def page(name: str) -> str:
    return (CONCEPTS / name).read_text(encoding="utf-8")


def tables(text: str) -> list[list[list[str]]]:
    """Every table of a page: its rows below the titles, without emphasis."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [[c.strip().replace("**", "").replace("`", "") for c in r.split("|")[1:-1]] for r in block.splitlines()]
        found.append(rows[2:])
    return found


@cache
def tiny() -> fxpipe.Build:
    """The build of the example: `--fp-cut c --bp-cut b`."""
    task = load_task(CONCEPTS / "tiny.py")
    torch.manual_seed(0)
    return fxpipe.compile(
        task.model(), task.loss, task.example(), workers=2, forward_at=["c"], backward_at=["b"], cost="analytic",
        command="fxpipe compile tiny.py -n 2 --fp-cut c --bp-cut b --schedule async",
    )  # fmt: skip


def worker_of(bounds: Sequence[tuple[int, int]], unit: int) -> int:
    return next(worker for worker, (first, end) in enumerate(bounds) if first <= unit < end)


def test_the_example_is_the_file() -> None:
    (shown,) = re.findall(r"```python\n(import torch\n.*?)```", page("README.md"), re.S)
    assert shown == (CONCEPTS / "tiny.py").read_text()


def test_the_lines_of_the_program_were_printed() -> None:
    from fxpipe.ir.printer import print_program

    texts: list[str] = []
    task = load_task(CONCEPTS / "tiny.py")
    program = fxpipe.capture(task.model(), task.loss, task.example())
    fxpipe.lower(
        program, workers=2, forward_at=["c"], backward_at=["b"], cost="analytic",
        observers=[lambda a: texts.append(print_program(a.program)) if a.step.name == "cut" else None],
    )  # fmt: skip
    shown = re.findall(r"^    (\w+ = aten.*)$", page("README.md"), re.M)
    assert len(shown) == 4
    assert set(shown) <= set(texts[0].splitlines())
    assert "`dump/04_cut.py`" in page("README.md")


def test_the_units_and_their_workers() -> None:
    stages = tiny().plan.stages
    shown = tables(page("cuts.md"))[0]
    assert len(shown) == len(tiny().plan.step.units)
    for number, (unit, name, forward, backward) in enumerate(shown):
        assert unit == f"u{number}"
        assert tiny().plan.step.units[number] in (name, "")
        assert int(forward) == worker_of([s.forward_units for s in stages], number)
        assert int(backward) == worker_of([s.backward_units for s in stages], number)


def test_the_edges() -> None:
    shown = [row[:4] for row in tables(page("cuts.md"))[1]]
    edges = tiny().plan.edges
    places = {(e.name, e.kind, f"worker {e.src}, {e.src_phase}", f"worker {e.dst}, {e.dst_phase}") for e in edges}
    assert {tuple(row) for row in shown} == places
    assert len(shown) == len(edges)


def test_the_owners() -> None:
    said: dict[str, tuple[int, str]] = {}
    for names, owner, readers in tables(page("owners.md"))[0]:
        for name in names.split(", "):
            said[name] = (int(owner), readers)
    assert said == {p.name: (p.owner, _readers(p)) for p in tiny().plan.parameters}


def _readers(parameter: ParameterSpec) -> str:
    """`F and B on worker 1`, `F on worker 0, B on worker 1`."""
    phases: dict[int, list[str]] = {}
    for worker, phase in parameter.readers:
        phases.setdefault(worker, []).append(phase)
    return ", ".join(f"{' and '.join(found)} on worker {worker}" for worker, found in phases.items())


def test_the_grids_of_schedules() -> None:
    text = page("schedules.md").replace("\n    ", "\n")
    for name, microbatches, minibatches in (
        ("gpipe", 4, 2),
        ("1f1b", 4, 2),
        ("zb-h1", 4, 2),
        ("zb-h2", 4, 2),
        ("async", 1, 5),
    ):
        assert f"\n{grid(make_schedule(name, 2, microbatches), minibatches)}\n" in text
    for name in ("interleaved", "zb-v", "v-half", "v-min", "dualpipev"):
        assert f"\n{grid(make_schedule(name, 4, 2), 1)}\n" in text


def test_the_bubble_of_a_flush() -> None:
    assert "(N − 1)/(M + N − 1)" in page("schedules.md")
    for name in ("gpipe", "1f1b"):
        for workers, microbatches in ((2, 2), (3, 4), (4, 9)):
            schedule = make_schedule(name, workers, microbatches)
            found = simulate(schedule, Scenario((StageTime(1.0, 2.0),) * workers), 4)
            assert found.bubble == pytest.approx((workers - 1) / (microbatches + workers - 1))


def test_the_staleness_on_two_workers() -> None:
    versions = Versions(make_schedule("async", 2))
    expected = [[f"{versions.lag('F', r, o)}/{versions.lag('B', r, o)}" for r in (0, 1)] for o in (0, 1)]
    assert [row[1:] for row in tables(page("versions.md"))[0]] == expected


def test_the_rule_of_staleness() -> None:
    assert "⌈(N − 1 − k − j)/M⌉" in page("versions.md")
    for workers in range(1, 6):
        for microbatches in range(1, 5):
            versions = Versions(make_schedule("async", workers, microbatches))
            for k in range(workers):
                for j in range(microbatches):
                    assert versions.lag("F", k, k, j) == max(0, -(-(workers - 1 - k - j) // microbatches))
                    assert versions.lag("B", k, k, j) == 0


@pytest.mark.parametrize(("policy", "workers", "minibatches"), [("latest", 2, 5), ("stash", 2, 5), ("spectrain", 3, 4)])
def test_the_grids_of_policies(policy: str, workers: int, minibatches: int) -> None:
    text = page("policies.md").replace("\n    ", "\n")
    assert f"\n{sees(make_policy(policy), make_schedule('async', workers), minibatches)}\n" in text


def test_what_the_weight_copy_is() -> None:
    demand = choose(tiny().plan, "async", "spectrain").demand
    (message,) = demand.messages(1, 0, 7, 0, None)
    assert message.names == ("b.weight", "b.bias")
    assert (message.version, message.ahead) == (7, 1)
    kept = choose(tiny().plan, "async", "stash").demand
    (reading,) = [r for r in kept.readings(1, "B") if "b.weight" in r.names]
    assert reading.lags == (1,), "B sees what F on worker 0 saw"


def test_the_python_examples_print_what_is_shown() -> None:
    for name in ("schedules.md", "policies.md"):
        (code,) = re.findall(r"```python\n(.*?)```", page(name), re.S)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(code, {})
        assert out.getvalue().strip()
        assert out.getvalue().strip() in page(name).replace("\n    ", "\n")


def test_the_stage_in_the_guide_is_what_is_emitted() -> None:
    guide = (DOCS / "how-to" / "debug.md").read_text(encoding="utf-8")
    emitted = tiny().files["stage_0.py"]
    header, backward = re.findall(r"```python\n(\"\"\"Stage 0.*?|def backward.*?)```", guide, re.S)
    assert emitted.startswith(header)
    assert emitted.endswith(backward)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_somewhere(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.S)
    for target, _, section in (link.partition("#") for link in re.findall(r"\]\(([^)\s]+)\)", text)):
        if ":" in target:
            continue
        found = path if not target else (path.parent / target).resolve()
        if found in PRINTED:  # `make docs` checks these links
            continue
        assert found.exists(), f"{path.name} links to {target}"
        if section:
            titles = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.M)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert section in anchors, f"{path.name} links to {target}#{section}"


def test_every_design_note_is_listed() -> None:
    folder = DOCS / "design"
    listed = re.findall(r"\]\(([\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")


# Pictures


@pytest.mark.slow
def test_the_pictures_are_what_fxpipe_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PICTURES / "make.py"), str(tmp_path)], check=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    kept = {path.name: path.read_bytes() for path in PICTURES.glob("*.svg")}
    assert made == kept, "python docs/pictures/make.py"


def test_every_picture_is_shown() -> None:
    shown = {name for path in PAGES for name in re.findall(r"pictures/([\w-]+\.svg)\)", path.read_text("utf-8"))}
    assert shown == {path.name for path in PICTURES.glob("*.svg")}
