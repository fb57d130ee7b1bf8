"""What `fxpipe diff` says of two builds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from commands import QUICK, Result, fxpipe, unchanged
from model_files import write_model


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model.py` and three builds of it."""
    folder = tmp_path_factory.mktemp("builds")
    write_model(folder)
    cuts = {"one": ("blocks.2", "blocks.1"), "two": ("blocks.3", "blocks.1"), "deep/three": ("blocks.2", "blocks.1")}
    for name, (forward, backward) in cuts.items():
        pins = ("--fp-cut", forward, "--bp-cut", backward)
        assert fxpipe("compile", folder / "model.py", *QUICK, *pins, "-o", folder / name).code == 0
    more = ("--schedule", "1f1b", "--microbatches", "2")
    assert fxpipe("compile", folder / "model.py", *QUICK, "-n", "3", *more, "-o", folder / "four").code == 0
    return folder


@pytest.fixture
def here(builds: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(builds)
    return builds


def diff(*arguments: object) -> Result:
    return fxpipe("diff", *arguments)


def test_cuts_that_moved(here: Path) -> None:
    with unchanged(here):
        result = diff("one", "two")
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == "one → two"
    (moved,) = [line for line in lines if line.startswith("F from worker 1 to 0: ")]
    assert " units, " in moved
    assert not [line for line in lines if line.startswith("B from")]
    assert [line for line in lines if line.split()[3:5] == ["B1", "saved"] or line.split()[2:4] == ["B1", "saved"]]
    assert "the stages' code differs: stage_0.py, stage_1.py" in lines
    assert max(map(len, lines)) <= 80
    assert "identical" not in result.out


def test_settings_and_workers_that_came(here: Path) -> None:
    lines = diff("one", "four").out.splitlines()
    assert {"workers: 2 → 3", "schedule: async → 1f1b", "policy: spectrain+ef → latest"} <= set(lines)
    first, second = [line.split() for line in lines if line.startswith("2       ")]
    assert first == ["2", "first", *["–"] * 6]
    assert second[1] == "second"
    assert "–" not in second
    assert max(map(len, lines)) <= 80


def test_identical_builds_wherever_they_lie(here: Path) -> None:
    for second in ("one", "deep/three"):
        result = diff("one", second)
        assert (result.code, result.err) == (0, "")
        assert result.out == f"one → {second}\n\nthe builds are identical\n"
        assert diff("one", second, "--json").json["identical"] is True


def test_the_command_is_no_difference(here: Path, tmp_path: Path) -> None:
    for name, pins in {"a": ("--fp-cut", "norm"), "b": ("--fp-cut", "norm", "--bp-cut", "norm")}.items():
        assert fxpipe("compile", "model.py", *QUICK, *pins, "-o", tmp_path / name).code == 0
    assert (tmp_path / "a" / "stage_0.py").read_text() != (tmp_path / "b" / "stage_0.py").read_text()
    assert diff(tmp_path / "a", tmp_path / "b").out.endswith("\n\nthe builds are identical\n")


def test_json_has_all(here: Path) -> None:
    found = diff("one", "two", "--json").json
    assert found["identical"] is False
    assert found["first"] == "one"
    assert found["moved"][0]["modules"] == ["blocks.2", "(no module)"]
    assert {row["kind"] for row in found["edges"]} >= {"activation", "saved"}
    assert found["weights"] is False
    assert {w["worker"] for w in found["workers"]} == {0, 1}


def test_another_model_edited_stages_and_stale_builds(here: Path, tmp_path: Path) -> None:
    shutil.copytree(here / "one", tmp_path / "one")
    model = write_model(tmp_path, ("nn.Linear(8, 3)", "nn.Linear(8, 3, bias=False)"))
    pins = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")
    assert fxpipe("compile", model, *QUICK, *pins, "-o", tmp_path / "two").code == 0
    stage = tmp_path / "two" / "stage_1.py"
    stage.write_text(stage.read_text() + "# mine\n")
    model.write_text(model.read_text() + "\ntorch.manual_seed(0)\n")
    text = diff(tmp_path / "one", tmp_path / "two").out
    joined = " ".join(text.split())
    assert f"only in {tmp_path / 'one'}: head.bias" in joined
    assert "the model's sources differ: model.py" in joined
    assert f"edited in {tmp_path / 'two'}: stage_1.py" in joined
    assert f"{tmp_path / 'two'} is stale: model.py: top level is new" in joined
    assert "the initial weights differ" in joined


def test_another_seed_is_a_difference(here: Path, tmp_path: Path) -> None:
    pins = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")
    assert fxpipe("compile", "model.py", *QUICK, *pins, "--seed", 1, "-o", tmp_path / "seeded").code == 0
    out = diff("one", tmp_path / "seeded").out
    assert "\nthe initial weights differ\n" in out
    assert "identical" not in out


def test_links_speeds_and_the_optimizer_are_settings(here: Path, tmp_path: Path) -> None:
    """Not only the cuts that came of them."""
    model = write_model(tmp_path, ("momentum=0.9", "momentum=0.0"))
    pins = ("--fp-cut", "blocks.2", "--bp-cut", "blocks.1")
    options = ("--bandwidth", "1GB/s", "--latency", "20us", "--speed", "1,0.5")
    assert fxpipe("compile", model, *QUICK, *pins, *options, "-o", tmp_path / "far").code == 0
    said = " ".join(diff("one", tmp_path / "far").out.split())
    for expected in (
        "links: links 3 GB/s, 50 µs, 0.33 ns a byte to copy → links 1 GB/s, 20 µs, 0.33 ns a byte to copy",
        "speeds: all equal → 1, 0.5",
        "optimizer bytes: 1.0 → 0.0",
    ):
        assert expected in said
    assert diff("one", tmp_path / "far", "--json").json["identical"] is False


def test_what_is_no_build(here: Path) -> None:
    for wrong in ("nothing", "model.py", "deep"):
        result = diff("one", wrong)
        assert (result.code, result.out) == (1, "")
        assert result.err.startswith("error: ")
        assert wrong in result.err
        assert "Traceback" not in result.err
    assert diff("one").code == 2
