"""Every example in every command's help runs as it stands, in a folder that has what it names, and exits with 0.

The model of `examples/gpt.py` and `model.py` is a small one with the modules that the examples name.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import click
import pytest
from commands import Result, fxpipe

from fxpipe.cli.main import cli

MODEL = """\
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unsqueeze(1).chunk(3, -1)  # one head
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(16, 32)

    def forward(self, ids):
        x = self.tok(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    return GPT()


def loss(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def train_data():
    return list(torch.randint(0, 32, (64, 8, 9)))


def eval_data():
    return train_data()[:4]


def metrics(model, ids):
    return {"loss": loss(model, ids)}
"""
PIPEDREAM = "".join(
    f"node{i} -- Layer{i} -- forward_compute_time=1.0, backward_compute_time=2.0, "
    f"activation_size={2048.0 * i}, parameter_size=4096.0\n"
    for i in range(1, 9)
) + "".join(f"\tnode{i} -- node{i + 1}\n" for i in range(1, 8))
RUNS = ("out", "run", "run1", "run2", "runs/async")
OUTPUTS = ("-o", "--out", "--html", "--trace")


def paragraphs(command: click.Command) -> Iterator[str]:
    """The verbatim paragraphs of a command's help: those that click does not wrap."""
    for paragraph in re.split(r"\n\s*\n", command.help or ""):
        mark, _, rest = paragraph.strip().partition("\n")
        if mark == "\b":
            yield rest


def examples() -> list[str]:
    """Every command line of every help text, without the words behind it."""
    found = []
    for command in (cli, *cli.commands.values()):
        for line in "\n".join(paragraphs(command)).splitlines():
            if re.match(r"\s*(torchrun .*)?fxpipe ", line):
                found.append(re.split(r" {3,}", line.strip())[0])
    return list(dict.fromkeys(found))


def test_every_command_has_an_example() -> None:
    found = examples()
    for name in cli.commands:
        assert any(f"fxpipe {name} " in f"{line} " for line in found), name


def test_words_behind_an_example_are_no_part_of_it() -> None:
    assert "fxpipe run build/ --steps 500" in examples()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that examples name: models, profiles, builds and runs."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "examples").mkdir()
    for name in ("examples/gpt.py", "examples/digits.py", "model.py"):
        (folder / name).write_text(MODEL)
    (folder / "vgg16.txt").write_text(PIPEDREAM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        compile_ = ("compile", "examples/gpt.py", "-n", 2, "--cost", "analytic", "--threads", 1)
        done = [
            fxpipe(*compile_, "-o", "build"),
            fxpipe(*compile_, "-o", "build1"),
            fxpipe(*compile_, "--fp-cut", "blocks.4", "--bp-cut", "blocks.3", "-o", "build2"),
            *(fxpipe("run", "build", "--steps", 20, "--local", "--out", out) for out in RUNS),
            fxpipe("run", "build", "--steps", 20, "--local", "--schedule", "gpipe", "--out", "runs/gpipe"),
        ]
    assert [result.err for result in done if result.code] == []
    return folder


@pytest.mark.slow
@pytest.mark.multiproc
@pytest.mark.parametrize("line", examples())
def test_an_example_works(line: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    shutil.copytree(prepared, folder)
    other = "run2" if "fxpipe compare" in line else "build2"  # what `other/` is there
    shutil.copytree(prepared / other, folder / "other")
    words = shlex.split(line)
    written = [folder / value for option, value in pairwise(words) if option in OUTPUTS]
    for path in written:
        if path.is_dir() and "fxpipe compile" not in line:
            shutil.rmtree(path)
    monkeypatch.chdir(folder)
    if words[0] == "fxpipe":
        done = fxpipe(*words[1:])
    else:
        monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
        run = subprocess.run(words, capture_output=True, text=True, timeout=300)
        done = Result(run.returncode, run.stdout, run.stderr)
    assert done.code == 0, f"{line}\n{done.out}\n{done.err}"
    assert "Traceback" not in done.err
    if "--json" in words:
        assert done.out.startswith("{")
    for path in written:
        assert path.is_file() or any(path.iterdir()), f"{line} left no {path.name}"
