"""A run's folder is read as far as it goes, and what is missing is said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fxpipe.errors import RunError
from fxpipe.observe.run_folder import SPANS, read_run
from fxpipe.observe.run_json import RunJson
from fxpipe.observe.trace.writer import TraceWriter

DIGEST = "0123456789abcdef"


def write_trace(path: Path, steps: int, workers: int = 2, build: str = DIGEST) -> None:
    with TraceWriter(path, workers) as writer:
        for worker in range(workers):
            rows: list[tuple[Any, ...]] = []
            for i in range(steps):
                at = 1000 * i
                rows.append(("F", f"F{i}", i, 0, at, at + 300))
                rows.append(("wait", "wait for a from worker 0", i, 0, at + 100, at + 200))
                rows.append(("B", f"B{i}", i, 0, at + 300, at + 900))
            writer.add(worker, *zip(*rows, strict=True))
        writer.close({"build": build, "workers": workers})


def write_run(folder: Path, steps: int = 5, workers: int = 2) -> Path:
    """A whole run: all files, no problem."""
    folder.mkdir(parents=True)
    write_trace(folder.parent / "trace.json", steps, workers)
    run = {
        "format": 1,
        "build": {"folder": "build", "digest": DIGEST},
        "schedule": "async",
        "microbatches": 1,
        "steps": steps,
        "seconds": 2.5,
        "workers": [{"rank": k, "busy": 0.9} for k in range(workers)],
        "time_losses": [{"worker": 1, "share": 0.1, "cause": "wait", "text": "worker 1 waits"}],
        "trace": "../trace.json",
    }
    (folder / "run.json").write_text(json.dumps(run, indent=1))
    lines = [
        {"step": i + 1, "loss": 2.0 - 0.1 * i, "lr": 0.1, "seconds": 0.5 * (i + 1), "samples_per_second": 64.0}
        for i in range(steps)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_whole_run(run: Path) -> None:
    found = read_run(run, DIGEST)
    assert found["problems"] == []
    assert found["folder"] == str(run)
    assert (found["schedule"], found["steps"], found["workers"][1]["rank"]) == ("async", 5, 1)
    assert found["metrics"] == {
        "step": [1, 2, 3, 4, 5],
        "loss": pytest.approx([2.0, 1.9, 1.8, 1.7, 1.6]),
        "lr": [0.1] * 5,
        "grad_norm": [None] * 5,
        "loss_scale": [None] * 5,
        "seconds": [0.5, 1.0, 1.5, 2.0, 2.5],
        "samples_per_second": [64.0] * 5,
        **dict.fromkeys(("tokens_per_second", "tflops_per_device", "mfu"), [None] * 5),
    }
    timeline = found["timeline"]
    assert (timeline["minibatches"], timeline["of"], timeline["seconds"]) == (5, 5, pytest.approx(4.9e-6))
    assert timeline["spans"][:4] == [
        [0, "F", 0, 0, 0.0, 1e-7],
        [0, "wait", 0, 0, 1e-7, 2e-7],
        [0, "F", 0, 0, 2e-7, 3e-7],
        [0, "B", 0, 0, 3e-7, 9e-7],
    ]
    json.dumps(found, allow_nan=False)


def test_the_format_that_was_written_first(tmp_path: Path) -> None:
    """A run of an earlier fxpipe is read without a problem, and what is written has the same fields."""
    text = Path(__file__).with_name("golden").joinpath("run-of-format-1.json").read_text()
    body = json.loads(text) | {"trace": None}
    (tmp_path / "run.json").write_text(json.dumps(body))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i + 1}) + "\n" for i in range(12)))
    found = read_run(tmp_path, body["build"]["digest"])
    assert found["problems"] == []
    assert {name: found[name] for name in body} == body
    assert RunJson.of(body).to_json() == body | {"losses": []}


def test_what_an_earlier_fxpipe_did_not_write(tmp_path: Path) -> None:
    run = RunJson.of({"steps": 1, "seed": 7, "workers": [{"rank": 1}]})
    assert (run.options, run.workers[0].spent, run.time_losses) == ({"seed": 7}, {}, [])
    assert not {"evaluation", "best", "mfu"} & run.to_json().keys()


def test_a_run_of_another_build_is_refused(run: Path) -> None:
    with pytest.raises(
        RunError, match=r"run is a run of another build: that one's digest is 0123456789ab, this one's f"
    ):
        read_run(run, "f" * 16)
    assert read_run(run)["problems"] == []


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing is not a run: it does not exist"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"is not a run: it has neither run.json nor metrics.jsonl") as caught:
        read_run(tmp_path)
    assert caught.value.hint


def test_without_its_summary(run: Path) -> None:
    (run / "run.json").unlink()
    found = read_run(run, DIGEST)
    assert found["problems"] == [
        "run.json is missing: the run did not end, its settings and its timeline are unknown",
        "run.json does not say which build it ran: it may not be this one",
    ]
    assert len(found["metrics"]["step"]) == 5
    assert found["timeline"] is None
    assert "workers" not in found


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"format": 1,\n "steps": 4', "run.json:2 cannot be read (not JSON"),
        ("", "run.json:1 cannot be read (not JSON"),
        ("[1]", "run.json, $ cannot be read (expected object, got array)"),
        ('{"format": 7}', "run.json is of format 7, this fxpipe reads 1"),
        ('{"format": 1, "workers": 3}', "run.json, $.workers: expected array, got int"),
        (
            '{"format": 1, "workers": [{"busy": 1}]}',
            "run.json, $.workers[0]: object missing required field rank",
        ),
        ("\0\xff", "run.json cannot be read (it is not UTF-8)"),
    ],
)
def test_a_broken_summary(run: Path, text: str, problem: str) -> None:
    (run / "run.json").write_text(text, encoding="latin-1")
    found = read_run(run)
    assert problem in found["problems"][0]
    assert "workers" not in found
    assert len(found["metrics"]["step"]) == 5


def test_nan_is_no_json(run: Path) -> None:
    (run / "run.json").write_text('{"format": 1, "bubble": NaN}')
    found = read_run(run)
    assert found["bubble"] is None
    json.dumps(found, allow_nan=False)


def test_metrics_that_were_cut_off(run: Path) -> None:
    path = run / "metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole[: whole.index('{"step": 4') + 20])
    found = read_run(run)
    assert found["problems"] == [
        "metrics.jsonl ends in the middle of line 4: 3 steps are shown",
        "metrics.jsonl holds 3 of the run's 5 steps",
    ]
    assert found["metrics"]["step"] == [1, 2, 3]
    path.write_text(whole[: whole.index('{"step": 2') + 20])
    assert "metrics.jsonl ends in the middle of line 2: 1 step is shown" in read_run(run)["problems"]


def test_every_cut_of_the_metrics_is_read(run: Path) -> None:
    path = run / "metrics.jsonl"
    whole = path.read_text()
    for length in range(len(whole)):
        path.write_text(whole[:length])
        found = read_run(run)
        steps = whole[:length].count("}")
        assert found["metrics"]["step"] == list(range(1, steps + 1))
        last = [f"metrics.jsonl holds {steps} of the run's 5 steps"] if steps < 5 else []
        assert found["problems"][-1:] == last


def test_lines_that_are_no_steps_are_left_out(run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[1], lines[3] = "\xff\0garbage\n", '{"step": null}\n'
    path.write_text("".join(lines), encoding="latin-1")
    found = read_run(run)
    assert found["metrics"]["step"] == [1, 3, 5]
    assert "metrics.jsonl: line 2 is not a step, nor is one more: left out" in found["problems"]


def test_a_loss_that_is_not_finite_is_null(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": null, "seconds": 1}\n{"step": 2, "loss": NaN}\n')
    assert read_run(run)["metrics"]["loss"] == [None, None]


def test_files_that_are_missing(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run.parent / "trace.json").unlink()
    found = read_run(run)
    assert found["problems"] == [
        "metrics.jsonl is missing: loss and throughput over time are missing",
        "trace.json is missing where run.json says it is (../trace.json): there is no timeline",
    ]
    assert found["metrics"]["step"] == []
    assert found["timeline"] is None


def test_a_truncated_trace_is_not_shown(run: Path) -> None:
    path = run.parent / "trace.json"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex("\n", 0, whole.index('"name":"B3"'))])
    found = read_run(run)
    assert found["problems"] == ["trace.json cannot be read (it is cut off): there is no timeline"]
    assert found["timeline"] is None


@pytest.mark.parametrize(("steps", "build"), [(5, "f" * 16), (6, DIGEST)])
def test_another_runs_trace_is_not_shown(run: Path, steps: int, build: str) -> None:
    write_trace(run.parent / "trace.json", steps, build=build)
    found = read_run(run)
    assert found["timeline"] is None
    assert len(found["problems"]) == 1
    assert "another " in found["problems"][0]


def test_a_long_timeline_shows_its_first_minibatches(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "run", steps=2000, workers=3))
    timeline = found["timeline"]
    assert timeline["of"] == 2000
    counts = Counter(span[2] for span in timeline["spans"])
    assert sorted(counts) == list(range(timeline["minibatches"]))
    assert SPANS - 3 * 4 < len(timeline["spans"]) <= SPANS
    assert timeline["seconds"] == max(span[5] for span in timeline["spans"])


def test_reading_a_run_imports_no_torch(run: Path) -> None:
    code = "import sys; from fxpipe.observe.run_folder import read_run; read_run(sys.argv[1])"
    code += "; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
