"""docs/errors: the code before fails with what is shown, the code after trains."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import QUICK, fxpipe

import fxpipe as api
from fxpipe.cli import explain
from fxpipe.lowering.compare_with_eager import compare_with_eager
from fxpipe.task.model_file import load_task

ROOT = Path(__file__).parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "errors").glob("*.md") if path.stem != "README")
BLOCK = re.compile(r"^```(python)?\n(.*?)^```$", re.M | re.S)
UNTIL_RUN = ("batch-shapes", "not-finite")  # compile knows the first batches only
MICROBATCHES = {"microbatches": 3}  # of the pages that are about them


def base() -> str:
    """The lines before every example."""
    found = BLOCK.search((ROOT / "docs" / "errors" / "README.md").read_text(encoding="utf-8"))
    assert found
    return found[2]


def example(folder: Path, code: str) -> Path:
    """The model file of an example."""
    attached = "\n\nNet.forward = forward\n" if re.search(r"^def forward", code, re.M) else ""
    path = folder / "model.py"
    path.write_text(f"{base()}\n\n{code}{attached}\n\nimport random\n\nrandom.seed(0)\n")  # after what imports draw
    return path


def refusal(folder: Path, code: str, run: bool, microbatches: int) -> str:
    """What the command line says of an example."""
    path = example(folder, code)
    schedule = ("--schedule", "1f1b", "--microbatches", microbatches) if microbatches > 1 else ()
    result = fxpipe("compile", path, "-o", folder / "build", *QUICK, *schedule)
    if run:
        assert result.code == 0, result.err
        result = fxpipe("run", folder / "build", "--local", "--steps", "9", "--out", folder / "out")
    assert result.code == 1, result.err
    # Where nothing in the user's files is the place, the command is: with the folders of this test.
    return re.sub(r"\n  at: fxpipe .*", "", result.err[result.err.index("error: ") :])


def trains(folder: Path, code: str, microbatches: int) -> None:
    """An example compiles, agrees with eager PyTorch, and trains on all of its batches."""
    task = load_task(example(folder, code))
    torch.manual_seed(0)
    model = task.model()
    hooks = {"optimizer": task.optimizer, "loss_weight": task.loss_weight}
    options = {"workers": 2, "cost": "analytic", "schedule": "1f1b", "microbatches": microbatches}
    build = api.compile(model, task.loss, task.example(), **options, **hooks)
    agreement = compare_with_eager(build, model, task.loss, task.example(), loss_weight=task.loss_weight)
    assert agreement.largest < 1e-5
    pipeline = build.local(**hooks)
    for batch in task.train_data():
        pipeline.step(batch)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_does_what_it_says(path: Path, tmp_path: Path, golden: Callable[[Path, str], None]) -> None:
    text = path.read_text(encoding="utf-8")
    blocks = list(BLOCK.finditer(text))
    refused, worked, renewed = 0, 0, text
    for i, block in enumerate(blocks):
        if not block[1]:
            continue
        folder = tmp_path / str(i)
        folder.mkdir()
        shown = blocks[i + 1] if i + 1 < len(blocks) and not blocks[i + 1][1] else None
        if shown is None:
            trains(folder, block[2], MICROBATCHES.get(path.stem, 1))
            worked += 1
            continue
        said = refusal(folder, block[2], path.stem in UNTIL_RUN, MICROBATCHES.get(path.stem, 1))
        renewed = renewed.replace(f"{block[0]}\n\n{shown[0]}", f"{block[0]}\n\n```\n{said}```")
        refused += 1
    golden(path, renewed)
    assert refused
    assert worked


def test_every_page_is_listed_and_named_by_an_error() -> None:
    index = (ROOT / "docs" / "errors" / "README.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\]\((\S+)\.md\)", index)) == {path.stem for path in PAGES}
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "fxpipe").rglob("*.py"))
    assert set(re.findall(r'page="(\S+)"', source)) <= {path.stem for path in PAGES}
    for path in PAGES:
        assert f'"{path.stem}"' in source, path
        assert len(path.read_text(encoding="utf-8").splitlines()) < 120, "short"


def test_explain_shows_the_pages() -> None:
    listed = fxpipe("explain")
    assert listed.code == 0
    assert [line.split()[0] for line in listed.out.splitlines()] == [path.stem for path in PAGES]
    shown = fxpipe("explain", "item")
    assert shown.out.strip() == (ROOT / "docs" / "errors" / "item.md").read_text(encoding="utf-8").strip()
    wrong = fxpipe("explain", "itme")
    assert wrong.code == 1
    assert "there is no page 'itme', did you mean 'item'?" in wrong.err
    assert explain.FOLDER.samefile(ROOT / "docs" / "errors")
