"""What `fxpipe inspect` prints."""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import golden_model
import pytest
import torch
from commands import QUICK, fxpipe
from model_files import write_model
from rich.console import Console

import fxpipe as library
from fxpipe.cli.terminal.overview import print_edges, print_grid, print_overview
from fxpipe.inspection.facts import facts
from fxpipe.inspection.report.marks import COLOURS
from fxpipe.inspection.subject import read_subject, subject_of
from fxpipe.inspection.tables import MANY
from fxpipe.inspection.timeline import explained
from fxpipe.passes.reduce import Reduce
from fxpipe.plan.cost_records import StageTime
from fxpipe.planner.quantity import size
from fxpipe.policy import POLICIES, Policy
from fxpipe.policy import make as make_policy
from fxpipe.policy.base import sight_rows
from fxpipe.schedule import make as make_schedule
from fxpipe.tracing.torch_versions import standing

GOLDEN = Path(__file__).parent / "golden"


@functools.cache
def golden_facts() -> dict[str, Any]:
    """The facts of the golden model, on cuts that part a module's forward from its backward."""
    torch.manual_seed(0)
    build = library.compile(
        golden_model.Golden(),
        golden_model.loss,
        golden_model.batch(),
        workers=2,
        cost="analytic",
        forward_at=["hidden"],
        backward_at=["head"],
    )
    return facts(subject_of(build))


def printed(show: Any, width: int, **options: Any) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, markup=False, emoji=False, **options)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.skipif(standing(torch.__version__) != "yes", reason="another torch may trace other operators")
@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("view", ["overview", "grid"])
def test_the_golden_model(view: str, width: int, golden: Callable[[Path, str], None]) -> None:
    if view == "overview":
        text = printed(lambda c: print_overview(golden_facts(), c), width)
    else:
        text = printed(lambda c: print_grid(golden_facts()["grid"], c), width)
    golden(GOLDEN / f"inspect_{view}_{width}.txt", text)


@pytest.mark.parametrize("width", [80, 100, 120, 160, 200])
def test_nothing_is_wider_than_the_terminal_nor_ends_in_blanks(width: int) -> None:
    text = printed(lambda c: (print_overview(golden_facts(), c), print_grid(golden_facts()["grid"], c)), width)
    assert max(map(len, text.splitlines())) <= width
    assert [line for line in text.splitlines() if line != line.rstrip()] == []


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build of the model file, in the working directory, with distinct cuts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    write_model(tmp_path)
    assert fxpipe("compile", "model.py", *QUICK, "--fp-cut", "blocks.2", "--bp-cut", "blocks.1").code == 0
    return Path("build")


def rows(text: str, header: str) -> list[list[str]]:
    """The cells of the table with that header, down to the next empty line or one that is no row."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.lstrip().startswith(header))
    found = []
    for line in lines[start + 2 :]:
        if not line or line[0] in "≠*" or line.startswith(("values cross", "modules add")):
            break
        found.append(re.split(r"  +", line.strip()))
    return found


def test_every_edge_is_there(build: Path) -> None:
    found = rows(fxpipe("inspect", build).out, "edge")
    edges = read_subject(build).plan.edges
    assert len(found) == len(edges) + 1
    ways = {row[2]: (row[0], row[1]) for row in found}
    for edge in edges:
        assert ways[edge.name] == (f"{edge.src_phase}{edge.src} → {edge.dst_phase}{edge.dst}", edge.kind)
    assert ways["2 parameters"] == ("update 1 → F0", "weights")


def test_depth_shows_every_module_down_to_there(build: Path) -> None:
    def names(*options: object) -> list[str]:
        return [row[0].lstrip("├└│ ") for row in rows(fxpipe("inspect", build, *options).out, "module")]

    assert names("--depth", 0) == ["(model)"]
    assert names("--depth", 1) == ["(model)", "first", "blocks", "norm", "head", "(own code)", "(loss)"]
    assert {f"blocks.{i}" for i in range(4)} <= set(names("--depth", 2))


def test_times_that_were_measured(build: Path) -> None:
    own = read_subject(build)
    assert "modules add up" not in printed(lambda c: print_overview(facts(own), c), 80)
    times = tuple(StageTime(0.001 * (k + 1), 0.002, 0.0005) for k in range(2))
    timed = dataclasses.replace(own, costs=dataclasses.replace(own.costs, times=times), measured=True)
    text = printed(lambda c: print_overview(facts(timed), c), 80)
    assert "modules add up their operators; workers were timed as they run" in text
    assert [row[1:4] for row in rows(text, "worker")] == [
        ["1.00", "2.00", "0.50"],
        ["2.00", "2.00", "0.50"],
    ]


def test_json_is_the_facts(build: Path) -> None:
    assert fxpipe("inspect", build, "--json").json == json.loads(json.dumps(facts(read_subject(build))))
    under = fxpipe("inspect", build, "--schedule", "gpipe", "--json").json
    assert under["grid"]["schedule"] == under["forecast"]["schedule"] == "gpipe"


def test_a_stage_as_it_is(build: Path) -> None:
    source = (build / "stage_1.py").read_text()
    assert fxpipe("inspect", build, "--stage", 1).out == source
    assert fxpipe("inspect", build, "--stage", 1, "--json").json == {
        "stage": 1,
        "file": "stage_1.py",
        "edited": False,
        "source": source,
    }
    result = fxpipe("inspect", build, "--stage", 2)
    assert result.code == 1
    assert "there is no stage 2" in result.err


def test_names_are_neither_markup_nor_control_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    named = 'nn.ModuleDict({"[bold]": nn.Linear(6, 8), "[/red]": nn.Linear(8, 8), ":smile:\\x1b[31m": nn.Linear(8, 8)})'
    write_model(
        tmp_path,
        ("self.first = nn.Linear(6, 8)", f"self.first = {named}"),
        ("x = torch.tanh(self.first(x))", "for part in self.first.values():\n            x = torch.tanh(part(x))"),
    )
    made = fxpipe("compile", "model.py", *QUICK, "-n", 3, "--fp-cut", "first.[/red]", "--fp-cut", "norm", "--verify")
    assert made.code == 0, made.err
    assert "first.[/red] (" in made.out
    for options in ("--depth", 3), ("--schedule", "async"):
        result = fxpipe("inspect", "build", *options)
        assert result.code == 0, result.err
        assert "\x1b" not in result.out + result.err
    tree = fxpipe("inspect", "build", "--depth", 3).out
    for name in ("├ [bold]", "├ [/red]", ":smile:[31m"):
        assert name in tree


def test_the_grid(build: Path) -> None:
    out = fxpipe("inspect", build, "--schedule", "async", "--policy", "spectrain").out
    assert out.startswith(
        "async · spectrain\nF2@1+1: the forward of minibatch 2 sees its worker's weights after 1 update,"
    )
    assert "\n0  F0@0   F1@0+1 ..     B0@0   F2@1+1" in out
    refused = fxpipe("inspect", build, "--schedule", "gpipe", "--policy", "stash")
    assert refused.code == 1
    assert "makes no sense" in refused.err


OWN = """

@fxpipe.policy.register
@dataclass(frozen=True)
class Late(fxpipe.policy.Policy):
    name = "late"

    def lag(self, newest, phase, microbatch, reader, owner):
        return newest.lag(phase, reader, owner, microbatch) + 1
"""


def test_a_policy_of_the_model_file(build: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is imported where it is asked for by its name, and not for what a run was."""
    monkeypatch.setitem(POLICIES, "late", Policy)  # which is undone
    del POLICIES["late"]
    with Path("model.py").open("a") as file:
        file.write("\nimport fxpipe\nfrom dataclasses import dataclass\n" + OWN)
    assert fxpipe("run", build, "--steps", 2, "--policy", "late", "--local", "--out", "run").code == 0
    del POLICIES["late"]
    looked = fxpipe("inspect", build, "--run", "run", "--json")
    assert looked.json["forecast"] is None
    assert "policy late is the model file's own, which is not imported: --policy late imports it" in looked.err
    assert "F3@1: the forward of minibatch 3 sees" in fxpipe("inspect", build, "--policy", "late").out
    unknown = fxpipe("inspect", build, "--policy", "lake")
    assert "there is no policy 'lake', did you mean 'late'" in unknown.err


def test_edited_stages_and_stale_sources_are_marked(build: Path) -> None:
    with (build / "stage_1.py").open("a") as file:
        file.write("# mine\n")
    with Path("model.py").open("a") as file:
        file.write("torch.set_num_threads(1)\n")
    result = fxpipe("inspect", build)
    assert "warning: stage_1.py was edited since it was compiled" in result.err
    assert "warning: the build is stale: since it was compiled, model.py: " in result.err
    assert "\nedited: stage_1.py · stale: model.py: top level is new\n" in result.out
    assert [row[0] for row in rows(result.out, "worker")] == ["0", "1*"]
    assert "* stage_1.py: edited since the compile" in result.out
    found = fxpipe("inspect", build, "--json").json
    assert found["build"]["edited"] == ["stage_1.py"]
    assert [w["edited"] for w in found["workers"]] == [False, True]
    assert fxpipe("inspect", build, "--stage", 1, "--json").json["edited"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("build", "--stage", "0", "--html", "page.html"), 2, "--stage and --html show different things"),
        (("build", "--stage", "0", "--run", "run"), 2, "--stage prints code and shows no run"),
        (("nothing",), 1, "there is no nothing"),
        (("model.py",), 1, "model.py is not an fxpipe build"),
        (("build", "--run", "nothing"), 1, "nothing is not a run"),
        (("build", "--html", "build/report.html"), 1, "is in a build folder"),
        (("build", "--html", "nowhere/report.html"), 1, "cannot be written"),
    ],
)
def test_requests_that_make_no_sense(build: Path, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = fxpipe("inspect", *arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_the_page_holds_what_json_prints(build: Path) -> None:
    found = fxpipe("inspect", build, "--html", "report.html", "--json").json
    page = Path("report.html").read_text()
    (embedded,) = re.findall(r'<script[^>]*id="facts"[^>]*>(.*?)</script>', page, re.S)
    assert json.loads(embedded) == found


def test_a_run_beneath_its_build(build: Path) -> None:
    assert fxpipe("run", build, "--local", "--steps", 3, "--out", "run").code == 0
    result = fxpipe("inspect", build, "--run", "run")
    assert result.code == 0, result.err
    assert re.search(r"^run run · async · spectrain\+ef · 3 steps · ", result.out, re.M)
    assert re.search(r"^[0-9.]+ samples/s", result.out, re.M)
    assert fxpipe("inspect", build, "--run", "run", "--json").json["run"]["steps"] == 3
    assert "held out" not in result.out
    found = json.loads(Path("run/run.json").read_text())
    found["evaluations"] = [{"step": s, "metrics": {"accuracy": s / 4, "error": None}} for s in (2, 3)]
    Path("run/run.json").write_text(json.dumps(found))
    evaluated = fxpipe("inspect", build, "--run", "run")
    assert re.search(r"^held out accuracy 0.7500, error –$", evaluated.out, re.M)
    lines = Path("run/metrics.jsonl").read_text()
    Path("run/metrics.jsonl").write_text(lines[:-20])
    cut = fxpipe("inspect", build, "--run", "run")
    assert cut.code == 0
    assert re.search(r"^metrics.jsonl ends in the middle of line 3", cut.out, re.M)
    assert fxpipe("compile", "model.py", *QUICK, "-n", 3, "-o", "other").code == 0
    other = fxpipe("inspect", "other", "--run", "run")
    assert other.code == 1
    assert "another build" in other.err


def test_colours_are_the_workers_own() -> None:
    text = printed(lambda c: print_overview(golden_facts(), c), 80, force_terminal=True, color_system="truecolor")
    for colour in COLOURS[:2]:
        red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
        assert f"38;2;{red};{green};{blue}m" in text
    assert re.sub(r"\x1b\[[0-9;]*m", "", text) == printed(lambda c: print_overview(golden_facts(), c), 80)


def test_no_colour_when_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = printed(lambda c: print_overview(golden_facts(), c), 80, force_terminal=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text)


def test_many_edges_of_one_way_are_summed_up() -> None:
    way = {"src": 0, "src_phase": "F", "dst": 1, "dst_phase": "B"}
    edge = {**golden_facts()["edges"][0], **way, "kind": "saved", "bytes": 1024}
    many = [{**edge, "name": f"v{i}"} for i in range(MANY + 1)] + [{**edge, "name": "alone", "dst": 2}]
    folded = printed(lambda c: print_edges(many, c), 100)
    assert re.search(rf"^F0 → B1 +saved +{MANY + 1} edges +– +{MANY + 1}\.0 KiB +– +–$", folded, re.M)
    assert "alone" in folded
    assert "v1 " not in folded
    assert "--edges shows each" in folded
    every = printed(lambda c: print_edges(many, c, every=True), 100)
    assert len(every.splitlines()) == len(many) + 3
    few = printed(lambda c: print_edges(many[:MANY], c), 100)
    assert "--edges" not in few


def test_what_a_cell_says() -> None:
    def sentence(schedule: str, policy: str, workers: int = 3, microbatches: int = 1) -> str:
        return explained(sight_rows(make_policy(policy), make_schedule(schedule, workers, microbatches), 8))

    assert sentence("async", "spectrain").startswith(
        "F3@1+2: the forward of minibatch 3 sees its worker's weights after 1 update, predicted 2 further. "
    )
    assert sentence("async", "stash").startswith("F3@1: the forward of minibatch 3 sees its worker's weights after 1")
    assert sentence("gpipe", "latest", microbatches=2).startswith(
        "F1.1@1: the forward of minibatch 1, microbatch 1, sees"
    )
    assert sentence("async", "latest", workers=1).startswith("F1@1: the forward of minibatch 1")


def test_many_workers_show_a_part_of_the_grid() -> None:
    grid = {"schedule": "async", "policy": "stash", "rows": []}
    grid["rows"] = sight_rows(make_policy("stash"), make_schedule("async", 24), 40)
    lines = printed(lambda c: print_grid(grid, c), 80).splitlines()
    assert max(map(len, lines)) <= 80
    shown = [line.split() for line in lines if re.match(r" ?\d+  ", line)]
    assert [int(row[0]) for row in shown] == list(range(24))
    assert all(".." not in row for row in shown), "the pipeline is full"
    assert re.fullmatch(r"columns \d+ to \d+ of \d+, those with the most actions; --json has all", lines[-1])


def test_what_replicas_add_up() -> None:
    program = library.capture(golden_model.Golden(), golden_model.loss, golden_model.batch())
    options = {
        "workers": 2,
        "schedule": "1f1b",
        "cost": "analytic",
        "forward_at": ["hidden"],
        "backward_at": ["hidden"],
    }
    build = library.lower(program, **options, reduce=Reduce((1, 3), bucket_bytes=1))
    found = facts(subject_of(build))
    stage = build.plan.stages[1]
    assert found["build"]["replicas"] == [1, 3]
    assert [w["buckets"] for w in found["workers"]] == [
        [],
        [{"name": b.name, "bytes": b.bytes, "parameters": list(b.parameters), "updaters": []} for b in stage.buckets],
    ]
    text = printed(lambda c: print_overview(found, c), 120)
    total = size(sum(bucket.bytes for bucket in stage.buckets))
    assert f"worker 1: 3 replicas, which add up {total} of gradients in {len(stage.buckets)} buckets\n" in text
    assert "worker 0: " not in text
    shares = library.lower(program, **options, reduce=Reduce((1, 3), sharded=True))
    assert " and share out the update\n" in printed(lambda c: print_overview(facts(subject_of(shares)), c), 120)
    assert "add up" not in printed(lambda c: print_overview(golden_facts(), c), 120)
