"""Replicas share an evaluation's batches out, unless one changes what the next one reads; other batches are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from apart import compiled_file, launched
from evaluated import build_of, write_evaluated

from fxpipe.errors import RunError
from fxpipe.runtime.options import RunOptions
from fxpipe.runtime.process.distributed_evaluation import sharing


def test_batches_that_change_buffers_are_not_shared_out(tmp_path: Path) -> None:
    """The next batch reads what the one before has left: each replica evaluates all."""
    seen = '        self.register_buffer("seen", torch.zeros(()))\n'
    counts = "        if not self.training:\n            self.seen += 1\n"
    smaller = ("[(torch.randint(0, 11, (8,)), torch.randint(0, 11, (8,)))", "[(torch.randint(0, 11, (6,)),) * 2")
    carrying = (
        ("        self.scale = nn", f"{seen}        self.scale = nn"),
        ("        x = self.embed(ids)", f"{counts}        x = (1 + self.seen) * self.embed(ids)"),
    )
    for edits, replicas in (((smaller,), 3), ((smaller, *carrying), 1)):
        folder = tmp_path / str(replicas)
        folder.mkdir()
        _, build = build_of(write_evaluated(folder, *edits), microbatches=1, dp=3, schedule="1f1b")
        assert sharing(build.plan) == replicas


@pytest.mark.slow
@pytest.mark.multiproc
def test_other_batches_are_told(tmp_path: Path) -> None:
    batches = "[(torch.randn(12, 8), torch.arange(12) % 4)]"
    own = f"def eval_data():\n    torch.manual_seed(os.getpid())\n    return {batches}\n"
    compiled_file(tmp_path, "1f1b", 1, 2, 1, own, outer=None)
    with pytest.raises(RunError, match="read different batches in an evaluation: replica 1 unlike replica 0"):
        launched(RunOptions(str(tmp_path / "build"), steps=2, eval_every=1, out=str(tmp_path / "out"), progress=False))
