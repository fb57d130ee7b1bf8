"""A run of thousands of steps keeps no more at its end than soon after its beginning."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import QUICK, finish, fxpipe, start_module
from model_files import write_model

FIRST, LAST = 2000, 4000  # a run takes 1,500 steps to reach the size it keeps
MEASURED = f"""

import gc, json, os, pathlib, sys

def train_data():
    batch = {{"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}}
    for number in range({LAST} + 1):
        if number in ({FIRST}, {LAST}):
            gc.collect()
            tensors = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
            shared = 0
            if "".join(sys.argv[1:2]).startswith("{{"):  # a worker's
                folder = pathlib.Path(json.loads(sys.argv[1])["board"])
                shared = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            with open(os.environ["MEASURED"], "a") as file:
                print(sys.getallocatedblocks(), tensors, shared, file=file)
        yield batch
"""


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("local", [True, False], ids=["local", "processes"])
def test_worker_0_keeps_no_object_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    """Of Python's own blocks, that is: the losses are in one array (tests/observe/test_record.py), and were two floats
    a step, with the time of each. Tracing memory would count tensors that torch has freed. Nor does what workers tell
    each other grow."""
    monkeypatch.setenv("MEASURED", str(tmp_path / "measured"))
    model = write_model(tmp_path)
    model.write_text(model.read_text() + MEASURED)
    assert fxpipe("compile", model, "-o", tmp_path / "build", *QUICK).code == 0
    arguments = ("run", tmp_path / "build", "--steps", LAST + 1, "--threads", 1, "--out", tmp_path / "out")
    more = ("--clip-norm", 1.0, "--log-staleness", "--log", f"tensorboard={tmp_path / 'events'}")
    more += ("--checkpoint-every", 350)  # no divisor of FIRST or LAST: nothing is written just when memory is measured
    in_process = fxpipe(*arguments, *more, "--local") if local else None
    result = in_process or finish(start_module("fxpipe", *arguments, *more), 500)
    assert result.code == 0, result.err
    (blocks, tensors, shared), (more_blocks, more_tensors, more_shared) = (
        map(int, line.split()) for line in (tmp_path / "measured").read_text().splitlines()
    )
    assert (more_blocks - blocks) / (LAST - FIRST) < 0.2
    assert more_tensors - tensors < 10
    assert more_shared - shared < 500
