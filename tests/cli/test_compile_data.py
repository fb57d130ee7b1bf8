"""Compile looks at what training data say: a DataLoader's last, smaller batch, shapes, schedulers for epochs."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import QUICK, fxpipe
from model_files import write_model

LOADER = """

def train_data():
    data = [(torch.randn(6), torch.randint(0, 3, ())) for _ in range({samples})]
    together = lambda rows: {{"x": torch.stack([x for x, _ in rows]), "y": torch.stack([y for _, y in rows])}}
    return torch.utils.data.DataLoader(data, batch_size=8, collate_fn=together{more})
"""


def loading(folder: Path, samples: int, more: str = "") -> Path:
    model = write_model(folder)
    model.write_text(model.read_text() + LOADER.format(samples=samples, more=more))
    return model


def test_a_smaller_last_batch_has_stages_of_its_own(tmp_path: Path) -> None:
    model = loading(tmp_path, 8 * 12 + 4)
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK, "--verify")
    assert result.code == 0, result.err
    assert "float32[4, 6]" in result.out
    run = fxpipe("run", tmp_path / "build", "--epochs", 2, "--local", "--out", tmp_path / "out", "--json")
    assert run.json["steps"] == 26


def test_a_last_batch_that_cannot_be_cut_is_warned_of(tmp_path: Path) -> None:
    asked = ("-n", 4, "--microbatches", 4)
    result = fxpipe("compile", loading(tmp_path, 99), *asked, "-o", tmp_path / "build", *QUICK)
    assert result.code == 0, result.err
    said = " ".join(result.err.split())
    assert "the last batch of an epoch will be smaller (batch['x'] float32[3, 6], batch['y'] int64[3])" in said
    assert "its step cannot be compiled: 4 microbatches do not divide a batch of 3; a run ends there" in said
    assert "compile with --microbatches 1: no other number divides 8 and 3; or leave out" in said
    assert "drop_last=True" in said


@pytest.mark.parametrize("samples", [51, 99])  # of seven batches, all are read; of thirteen, the loader tells
def test_the_number_of_microbatches_divides_the_last_batch(tmp_path: Path, samples: int) -> None:
    """A run trains to the end of its epochs, as the script does, and compile says what that costs."""
    made = fxpipe("compile", loading(tmp_path, samples), "--schedule", "1f1b", "-o", tmp_path / "build", *QUICK)
    assert made.code == 0, made.err
    assert "1 microbatch ·" in made.out
    assert (
        "the batch stays whole, which leaves workers idle about 50% of the time; 2 microbatches would leave 33%, but "
        in (" ".join(made.err.split()))
    )
    assert "a run ends there" not in made.err
    run = fxpipe("run", tmp_path / "build", "--epochs", 2, "--local", "--out", tmp_path / "out", "--json")
    assert run.json["steps"] == 2 * (samples // 8 + 1)


def test_a_run_does_not_offer_stages_where_the_microbatches_do_not_divide(tmp_path: Path) -> None:
    asked = ("--schedule", "1f1b", "--microbatches", 4)
    assert fxpipe("compile", loading(tmp_path, 102), *asked, "-o", tmp_path / "build", *QUICK).code == 0
    for more in ((), ("--new-shapes", 8)):
        run = fxpipe("run", tmp_path / "build", "--epochs", 1, "--local", *more, "--out", tmp_path / "out")
        said = " ".join(run.err.split())
        assert "no stages can be made for its shape: 4 microbatches do not divide a batch of 6" in said
        assert "hint: compile with --microbatches 1, or 2: no other number divides 8 and 6" in said
        assert "makes stages for it" not in said


def test_samples_that_are_not_first_are_not_guessed(tmp_path: Path) -> None:
    """The first dimension, 35, is not the DataLoader's 8: what its last batch looks like is not known."""
    model = write_model(
        tmp_path, ('model(batch["x"])', 'model(batch["x"].flatten(0, 1))'), ('batch["y"])', 'batch["y"].flatten())')
    )
    hook = LOADER.format(samples=98, more="").replace(
        "torch.randn(6), torch.randint(0, 3, ())", "torch.randn(35, 6), torch.randint(0, 3, (35,))"
    )
    hook = hook.replace("for x, _ in rows])", "for x, _ in rows], 1)").replace(
        "for _, y in rows])", "for _, y in rows], 1)"
    )
    model.write_text(model.read_text() + hook)
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK)
    assert result.code == 0, result.err
    assert "shape 1" not in result.out


@pytest.mark.parametrize(("samples", "more"), [(96, ""), (99, ", drop_last=True"), (5, "")])
def test_loaders_whose_batches_are_alike(tmp_path: Path, samples: int, more: str) -> None:
    result = fxpipe("compile", loading(tmp_path, samples, more), "-o", tmp_path / "build", *QUICK)
    assert result.code == 0, result.err
    assert "last batch" not in result.err
    assert "shape 1" not in result.out


def test_lengths_of_a_collator_are_seen(tmp_path: Path) -> None:
    lengths = "[(4, 6, 8)[number % 3] for number in range(9)]"
    model = write_model(tmp_path)
    hooks = f"\n\ndef train_data():\n    for n in {lengths}:\n        yield "
    hooks += '{"x": torch.randn(n, 6), "y": torch.randint(0, 3, (n,))}\n'
    model.write_text(model.read_text() + hooks)
    result = fxpipe("compile", model, "-o", tmp_path / "build", *QUICK, "--verify")
    assert result.code == 0, result.err
    assert "the first 8 batches of train_data() have 3 shapes" in " ".join(result.err.split())
    assert "gets its stages during the run (--new-shapes)" in " ".join(result.err.split())
    assert fxpipe("run", tmp_path / "build", "--local", "--out", tmp_path / "out", "--json").json["steps"] == 9
