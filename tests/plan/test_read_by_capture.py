"""A change of what capture can have read is seen; one of the optimizer, the data or a callback is not in the way."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxpipe.plan.read_by_capture import read_by_capture

MODEL = """
import torch
from torch import nn
{top}
LR = 0.1
WIDTH = 8
CONFIG = {{"scale": 1}}
TABLE = [1]

class Net(nn.Module):
    width = WIDTH
    def forward(self, x):
        return x * self.width

def model():
    return Net()

def loss(model, batch):
    {loss}
    return model(batch).sum()

def train_data():
    {data}
    return [torch.ones(3)]

def optimizer(named_parameters):
    {optimizer}
    return torch.optim.SGD([p for _, p in named_parameters], lr=LR)
"""

LATE = "from dataclasses import dataclass\n@{}\n@dataclass\nclass Late:\n    def lag(self): return 1"

READ = {
    "a class": ({}, "x * self.width", "x + self.width"),
    "a number that a class has": ({}, "WIDTH = 8", "WIDTH = 9"),
    "the loss": ({}, ".sum()", ".mean()"),
    "what the loss calls": ({"top": "def double(x): return 2 * x", "loss": "double(batch)"}, "2 * x", "3 * x"),
    "a default": ({"top": "def half(x, by=2): return x / by", "loss": "half(batch)"}, "by=2", "by=4"),
    "a name that is taken of another file": ({"top": "from layers import scale", "loss": "scale(batch)"}, "* 5", "* 6"),
    "another file": ({"top": "import layers", "loss": "layers.scale(batch)"}, "* 5", "* 6"),
    "another file under another name": ({"top": "import layers as l", "loss": "l.scale(batch)"}, "* 5", "* 6"),
    "all of another file": ({"top": "from layers import *", "loss": "scale(batch)"}, "* 5", "* 6"),
    "a file that the loss imports": ({"loss": "from layers import scale; scale(batch)"}, "* 5", "* 6"),
    "a file of a package": ({"top": "from nets import block", "loss": "block(batch)"}, "* 7", "* 8"),
    "a module of a package": ({"top": "from nets import blocks", "loss": "blocks.block(batch)"}, "* 7", "* 8"),
    "a submodule": ({"top": "import nets.blocks", "loss": "nets.blocks.block(batch)"}, "* 7", "* 8"),
    "a patch": ({"top": "nn.ReLU.forward = lambda self, x: 2 * x"}, "2 * x", "3 * x"),
    "a call at the top": ({"top": "torch.set_default_dtype(torch.float32)"}, "float32", "float64"),
    "a branch at the top": ({"top": "if True:\n    def two(): return 2", "loss": "two()"}, "return 2", "return 3"),
    "a registry": (
        {"top": "KINDS = {}\ndef known(f):\n    KINDS[f.__name__] = f\n    return f\n@known\ndef two(): return 2",
         "loss": "KINDS['two']()"}, "return 2", "return 3"),
    "what is found by its name": ({"top": "def two(): return 2", "loss": "globals()['two']()"}, "return 2", "return 3"),
    "what a module is asked for": (
        {"top": "import sys\ndef two(): return 2", "loss": "getattr(sys.modules[__name__], 'two')()"},
        "return 2", "return 3"),
    "a global that the data set": ({"top": "SCALE = 1", "loss": "batch * SCALE", "data": "global SCALE; SCALE = 2"},
                                   "SCALE = 2", "SCALE = 3"),
    "a dictionary that the data set": ({"loss": "CONFIG['scale']", "data": "CONFIG['scale'] = 2"}, "= 2\n", "= 3\n"),
    "a dictionary under another name": ({"loss": "CONFIG['scale']", "data": "c = CONFIG; c.update(scale=2)"},
                                        "scale=2", "scale=3"),
    "a list another function fills": (
        {"top": "def fill(into): into.append(2)", "loss": "TABLE[-1]", "data": "fill(TABLE); 4"},
        "; 4", "; fill(TABLE)"),
    "a list as a default": (
        {"top": "def more(x, seen=[]):\n    seen.append(x)\n    return len(seen)",
         "loss": "more(1)", "data": "more(2)"},
        "more(2)", "more(2), more(2)"),
    "an attribute of the loss": ({"loss": "loss.scale", "optimizer": "loss.scale = 2"}, "scale = 2", "scale = 3"),
    "an attribute of a class": ({"data": "Net.width = 2"}, "width = 2", "width = 3"),
    "a cache": (
        {"top": "import functools\n@functools.cache\ndef table(): return []",
         "loss": "table()", "data": "table().append(1)"},
        "append(1)", "append(2)"),
    "a default of torch": ({"data": "torch.set_default_dtype(torch.float32)"}, "float32", "float64"),
    "an environment variable": ({"top": "import os", "data": "os.environ['A'] = '1'"}, "'1'", "'2'"),
    "a package that may patch others": ({"top": "pass"}, "pass", "import unsloth"),
    "a hook that is new": ({}, "def train_data", "def eval_data(): pass\ndef train_data"),
    "metrics that are new": ({}, "def train_data", "def metrics(model, batch): pass\ndef train_data"),
    "metaclasses": ({"top": "class Meta(type):\n    def __init__(c, *a): nn.ReLU.a = 2\nclass A(metaclass=Meta): pass"},
                    "a = 2", "a = 3"),
    "a schedule": ({"top": "from fxpipe import schedule\n" + LATE.format("schedule.register")}, "return 1", "return 2"),
    "a policy that the loss uses": (
        {"top": "from fxpipe import policy\n" + LATE.format("policy.register"), "loss": "Late()"},
        "return 1", "return 2"
    ),
    "what is called as a policy's decorator": (
        {"top": "import layers as policy\n" + LATE.format("policy.register")}, "return 1", "return 2"
    ),
    "a policy's decorator that is bound again": (
        {"top": "from fxpipe import policy\npolicy = []\n" + LATE.format("policy.register")}, "return 1", "return 2"
    ),
}  # fmt: skip

NOT_READ = {
    "the optimizer": ({}, "optim.SGD", "optim.Adam"),
    "its rate": ({}, "LR = 0.1", "LR = 0.2"),
    "the data": ({}, "torch.ones(3)", "torch.zeros(3)"),
    "what only the data call": ({"top": "def ones(): return 2", "data": "ones()"}, "return 2", "return 3"),
    "a file of data": ({"top": "import layers", "data": "layers.scale(1)"}, "* 5", "* 6"),
    "a file of data that has more": ({"top": "from nets import block", "data": "block(1)"}, "* 7", "* 8"),
    "a new callback": ({}, "def train_data", "def on_step(step, loss, run): pass\ndef train_data"),
    "a new scheduler": ({}, "def train_data", "def lr_scheduler(optimizer): pass\ndef train_data"),
    "a library for the optimizer": ({}, "import torch\n", "import torch\nimport math\n"),
    "a comment": ({}, "LR = 0.1", "LR = 0.1  # of SGD"),
    "a script": ({"top": "if __name__ == '__main__':\n    print(1)"}, "print(1)", "print(2)"),
    "the default of the optimizer's setting": ({"optimizer": "fxpipe.setting('lr', 0.1)"}, "'lr', 0.1", "'lr', 0.2"),
    "a policy": ({"top": "from fxpipe import policy\n" + LATE.format("policy.register")}, "return 1", "return 2"),
    "a policy by its whole name": (
        {"top": "import fxpipe\n" + LATE.format("fxpipe.policy.register")},
        "return 1",
        "return 2",
    ),
    "a new policy": ({}, "def train_data", f"import fxpipe\n{LATE.format('fxpipe.policy.register')}\ndef train_data"),
    "a logger": (
        {"top": "from fxpipe.observe.logger import register\n" + LATE.format("register")},
        "return 1",
        "return 2",
    ),
    "numbers that the data share": ({"data": "torch.ones(WIDTH)"}, "torch.ones(WIDTH)", "torch.zeros(WIDTH)"),
}

ADAPTED = """
from layers import scale
from transformers import TrainingArguments
from fxpipe.adapters.transformers import trainer_hooks

def make():
    return Net(8)

def make_args():
    return TrainingArguments(learning_rate=0.1, bf16=False)

def samples(count):
    return [scale(2)] * count

TOP
hooks = trainer_hooks(model=make, args=make_args, train_dataset=samples(3), metrics=None)
globals().update(hooks)
"""


@pytest.mark.parametrize(
    ("top", "old", "new", "stale"),
    [
        ("", "samples(3)", "samples(4)", False),
        ("", "* 5", "* 6", False),
        ("", "learning_rate=0.1", "learning_rate=fxpipe.setting('lr', 0.1)", False),
        ("", "Net(8)", "Net(9)", True),
        ("", "bf16=False", "bf16=True", True),
        ("", "metrics=None", "metrics=print", True),
        ("", "model=make", "model=lambda: make()", True),
        ("", "globals().update(hooks)", "globals().update(hooks, model=1)", True),
        ("def loss(model, batch): return make_args().learning_rate", "=0.1", "=0.2", True),
        ("def loss(model, batch): return train_data()", "samples(3)", "samples(4)", True),
        ("def loss(model, batch): return globals()['samples'](2)", "* 5", "* 6", True),
        ("def trainer_hooks(**given): return given", "* 5", "* 6", True),
        ("hooks = {}", "* 5", "* 6", True),
    ],
)
def test_of_the_adapters_what_is_captured_counts(top: str, old: str, new: str, stale: bool, tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_text(ADAPTED.replace("TOP", top))
    before = read_by_capture(path).parts
    for file in tmp_path.rglob("*.py"):
        file.write_text(file.read_text().replace(old, new))
    assert (read_by_capture(path).parts != before) == stale


def write(folder: Path, **lines: str) -> Path:
    texts = dict.fromkeys(("top", "loss", "data", "optimizer"), "pass") | lines
    (folder / "layers.py").write_text("def scale(x):\n    return x * 5\n")
    (folder / "nets").mkdir(exist_ok=True)
    (folder / "nets" / "__init__.py").write_text("from .blocks import block\n")
    (folder / "nets" / "blocks.py").write_text("def block(x):\n    return x * 7\n")
    (folder / "model.py").write_text(MODEL.format(**texts))
    return folder / "model.py"


def changed(folder: Path, lines: dict[str, str], old: str, new: str) -> bool:
    path = write(folder, **lines)
    before = read_by_capture(path).parts
    files = [file for file in folder.rglob("*.py") if old in file.read_text()]
    assert files
    for file in files:
        file.write_text(file.read_text().replace(old, new))
    return read_by_capture(path).parts != before


@pytest.mark.parametrize("name", READ)
def test_what_capture_can_have_read(name: str, tmp_path: Path) -> None:
    assert changed(tmp_path, *READ[name])


@pytest.mark.parametrize("name", NOT_READ)
def test_what_it_cannot(name: str, tmp_path: Path) -> None:
    assert not changed(tmp_path, *NOT_READ[name])


def test_a_file_that_no_import_names_counts_as_a_whole(tmp_path: Path) -> None:
    path = write(tmp_path, loss="__import__('lay' + 'ers').scale(batch)")
    before = read_by_capture(path, ["layers.py"]).parts
    assert before.keys() >= {"layers.py", "model.py: optimizer"}  # the loss may call anything
    (tmp_path / "layers.py").write_text("\n")
    assert read_by_capture(path, ["layers.py"]).parts != before


@pytest.mark.parametrize(
    ("lines", "captured"),
    [
        ({"optimizer": "fxpipe.setting('a', 1)"}, {"a": False}),
        ({"loss": "fxpipe.setting('a', 1)"}, {"a": True}),
        ({"top": "A = fxpipe.setting('a', 1)", "optimizer": "A"}, {"a": False}),
        ({"top": "A = fxpipe.setting('a', 1)\nB = A + 1", "loss": "B"}, {"a": True}),
        ({"top": "A = dict(a=fxpipe.setting('a', 1))"}, {"a": True}),  # what dict is, is not known
    ],
)
def test_settings(lines: dict[str, str], captured: dict[str, bool], tmp_path: Path) -> None:
    found = read_by_capture(write(tmp_path, **lines))
    assert {name: bool(part) for name, part in found.settings.items()} == captured
    assert not found.any_setting


@pytest.mark.parametrize("text", ["read('a')", "fxpipe.setting(NAME, 1)", "[setting(n, 1) for n in 'ab']"])
def test_settings_whose_names_are_not_in_the_text(text: str, tmp_path: Path) -> None:
    top = "NAME = 'a'\nread = fxpipe.setting\nfrom fxpipe import setting"
    assert read_by_capture(write(tmp_path, top=top, loss=text)).any_setting
    assert not read_by_capture(write(tmp_path, top="NAME = 'a'", optimizer=text.replace("read", "print"))).any_setting


PARSED = "import argparse\nparser = argparse.ArgumentParser()\nparser.add_argument('--w')\n"
FUNCTION = "import argparse\ndef parse():\n    return argparse.ArgumentParser().parse_args()\n"


@pytest.mark.parametrize(
    ("lines", "attributes", "any_argument"),
    [
        ({"top": PARSED + "args = parser.parse_args()", "loss": "args.w", "optimizer": "args.lr"}, ["args.w"], False),
        ({"top": FUNCTION + "args = parse()", "loss": "args.w", "optimizer": "args.lr"}, ["args.w"], False),
        ({"top": FUNCTION + "args = parse()\nW = args.w", "loss": "W", "optimizer": "args.lr"}, ["args.w"], False),
        ({"top": FUNCTION + "args = parse()", "optimizer": "args.lr"}, [], False),
        ({"top": FUNCTION + "args = parse()", "loss": "print(args)"}, ["args"], False),
        ({"top": FUNCTION + "args = parse()", "loss": "parse().w"}, [], True),
        ({"top": FUNCTION, "optimizer": "parse().lr"}, [], False),
        ({"top": PARSED + "args = parser.parse_args()", "data": "[parser for parser in named_parameters]"}, [], False),
        ({"top": "import sys", "loss": "sys.argv[1]"}, [], True),
        ({"top": PARSED + "args, rest = parser.parse_known_args()", "optimizer": "args.lr"}, [], True),
    ],
)
def test_arguments(lines: dict[str, str], attributes: list[str], any_argument: bool, tmp_path: Path) -> None:
    found = read_by_capture(write(tmp_path, **lines))
    assert [label.partition(": ")[2] for label in found.arguments] == attributes
    assert bool(found.any_argument) == any_argument
