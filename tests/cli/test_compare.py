"""`fxpipe compare`."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from fxpipe.cli.compare import compare_command
from fxpipe.errors import RunError
from fxpipe.inspection.run_comparison import comparison
from fxpipe.observe.run_folder import read_run
from fxpipe.observe.trace import OF_TRAINING


def fxpipe_compare(*arguments: object) -> tuple[str, str]:
    """Stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert compare_command.main([str(a) for a in arguments], standalone_mode=False) == 0
    return out.getvalue(), err.getvalue()


def compared(*arguments: object) -> Any:
    return json.loads(fxpipe_compare(*arguments, "--json")[0])


def test_json_is_the_comparison(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", 200.0, seed=1)
    assert compared(one, two) == comparison(read_run(one), read_run(two))


def test_the_text_fits_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    busy = dict.fromkeys((*OF_TRAINING, "other"), 0.4)
    rows = [{"rank": k, "engines": ["eager"], "busy": 0.5, "seconds": 4.0, "spent": busy} for k in range(12)]
    one = write_run(tmp_path / "one", steps=40, policy="spectrain+ef")
    two = write_run(tmp_path / "two", steps=100_000, build={"folder": "other", "digest": "f" * 64})
    run = json.loads((two / "run.json").read_text())
    (two / "run.json").write_text(json.dumps(run | {"workers": rows}))
    out, err = fxpipe_compare(one, two)
    assert err == ""
    head = f"run 1  {one}\nrun 2  {two}\n"
    assert out.startswith(head)
    assert max(map(len, out.removeprefix(head).splitlines())) <= 80
    assert "\x1b" not in out
    for text in (
        "settings that differ\n",
        "build    build (01234567)  other (ffffffff)\n",
        "steps                  40            100000\n",
        "worker  run  busy   F   B   W  predict  update  send  receive  wait  data  other\n",
        "where run 1 lost time\n- worker 1 waits 10%\n",
    ):
        assert text in out, text


def test_the_same_run_twice(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one")
    out, err = fxpipe_compare(one, one)
    assert err == ""
    assert "no setting differs" in out
    assert out.endswith("They are equally fast.\n")


def test_a_run_that_was_stopped(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", 200.0)
    (two / "run.json").unlink()
    text = (two / "metrics.jsonl").read_text()
    (two / "metrics.jsonl").write_text(text[: text.index('{"step": 12') + 5])
    out, err = fxpipe_compare(one, two)
    assert f"warning: {two}: run.json is missing: the run did not end" in err
    assert f"warning: {two}: metrics.jsonl ends in the middle of line 12: 11 steps are shown" in err
    assert re.search(r"^median step +100 ms +200 ms +× 2$", out, re.M)
    assert out.endswith("After the same time (2.2 s) run 1 has the lower loss: 1.77 against 1.9.\n")
    (two / "metrics.jsonl").write_text("")
    out, err = fxpipe_compare(one, two)
    assert out.endswith("Which is faster is unknown: the throughput of one is missing.\n")
    assert compared(two, two)["loss"] == {"raw": [None, None], "smoothed": [None, None], "same_time": None}


def test_losses_that_are_not_finite(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two")
    (two / "metrics.jsonl").write_text('{"step": 1, "loss": null, "seconds": 1}\n')
    out, _ = fxpipe_compare(one, two)
    assert "–" in out
    assert "nan" not in out


def test_seeds_that_change_nothing_are_explained(tmp_path: Path) -> None:
    same = [write_run(tmp_path / f"seed={seed}", seed=seed) for seed in (0, 1)]
    out, err = fxpipe_compare(*same, "--seeds")
    assert "± 0" in out
    assert "a run's seed changes only the order of data" in err
    other = write_run(tmp_path / "seed=2", seed=2, decay=0.03)
    for folders in ([*same, other], [same[0], write_run(tmp_path / "policy", policy="latest")]):
        assert fxpipe_compare(*folders, "--seeds")[1] == ""


def test_arguments_are_shown_as_they_are_typed(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / width, arguments=["--width", width]) for width in ("32", "6 4")]
    assert re.search(r"^arguments +--width 32 +--width '6 4'$", fxpipe_compare(*runs)[0], re.M)
    assert "--width '6 4'" in fxpipe_compare(*runs, "--seeds")[0]
    assert compared(*runs)["settings"]["arguments"] == ["--width 32", "--width '6 4'"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        fxpipe_compare(write_run(tmp_path / "one"), tmp_path / "two")
