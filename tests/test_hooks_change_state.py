"""What hooks change and the step reads: a run ends where it was fixed at capture. tests/law trains with tensors, whose
new values travel."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import fxpipe
from model_files import write_model

NET = (
    ("class Net", "NET, ALPHA, CONFIG, TENSOR = None, 1.0, {'a': [1.0]}, torch.ones(())\n\n\nclass Net"),
    ("    return Net()", "    global NET\n    NET = Net()\n    return NET"),
    ('F.cross_entropy(model(batch["x"])', 'F.cross_entropy(model(batch["x"]) * ALPHA * CONFIG["a"][0] * TENSOR'),
)


def _run(folder: Path, hook: str, *more: str, edits: tuple[tuple[str, str], ...] = NET) -> str:
    """The run's error; '' if there is none."""
    path = write_model(folder, *edits)
    path.write_text(f"{path.read_text()}\n\n{hook}\n")
    build = folder / "build"
    compiled = fxpipe("compile", path, "-n", "2", "-o", build, "--schedule", "1f1b", "--cost", "analytic")
    assert compiled.code == 0, compiled.err
    ran = fxpipe("run", build, "--steps", "8", "--local", "--out", folder / "out", *more)
    assert (ran.code == 0) != ("error:" in ran.err)
    return ran.err.partition("error:")[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "says"),
    [
        ("def on_epoch(epoch, run):\n    global ALPHA\n    ALPHA = 0.5", "changes ALPHA (1.0 → 0.5)"),
        ("def on_step(step, loss, run):\n    CONFIG['a'][0] = 0.5", "before step 2"),
        ("def on_step(step, loss, run):\n    NET.eval()", "training (True → False)"),
        ("def on_step(step, loss, run):\n    NET.norm.momentum = 0.5", "NET.norm.momentum (0.1 → 0.5)"),
        ("def on_step(step, loss, run):\n    NET.head = nn.Linear(8, 3)", "one Linear → another"),
        ("def on_step(step, loss, run):\n    NET.norm.running_mean.zero_()", "NET.norm.running_mean"),
        (
            "def on_step(step, loss, run):\n    NET.head.weight.data.clamp_(-1, 1)",
            "the parameter NET.head.weight",
        ),
        (
            "class Falling(torch.optim.lr_scheduler.StepLR):\n    def step(self, *args):\n        global ALPHA\n"
            "        super().step(*args)\n        ALPHA = 0.9**self.last_epoch\n\n\n"
            "def lr_scheduler(optimizer):\n    return Falling(optimizer, 3)",
            "changes ALPHA (1.0 → 0.9)",
        ),
    ],
)
def test_what_was_fixed_at_capture_ends_the_run(tmp_path: Path, hook: str, says: str) -> None:
    error = _run(tmp_path, hook)
    assert says in error
    assert "hint:" in error


LEFT = (
    ("class Net", "SCALE, KEPT = 1.0, []\n\n\nclass Net"),
    (
        "    return Net()",
        "    global SCALE\n    SCALE, net = 0.5, Net()\n    KEPT[:] = [net.head.weight.requires_grad_(False)]\n"
        "    return net",
    ),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("assert SCALE == 0.5", ""),
        ("KEPT[0].data.mul_(SCALE)", "changes the parameter KEPT[0] (mul_)"),
        ("nn.init.normal_(KEPT[0])", "changes the parameter KEPT[0] (normal_)"),
        ("KEPT[0] = nn.Parameter(KEPT[0] * SCALE)", "another parameter in the place of KEPT[0]"),
    ],
)
def test_what_model_leaves_is_there_for_other_hooks(tmp_path: Path, line: str, says: str) -> None:
    hook = f"def lr_scheduler(optimizer):\n    {line}\n    return torch.optim.lr_scheduler.StepLR(optimizer, 3)"
    assert says in (error := _run(tmp_path, hook, edits=LEFT))
    assert bool(says) == bool(error)


@pytest.mark.slow
def test_another_model_is_the_users(tmp_path: Path) -> None:
    """Such as one that makes data, and learns."""
    teacher = (
        "TEACHER = nn.Linear(2, 2)\n\n\ndef on_step(step, loss, run):\n    nn.init.ones_((NET, TEACHER)[1].weight)"
    )
    assert _run(tmp_path, teacher) == ""


@pytest.mark.slow
def test_other_state_is_the_users(tmp_path: Path) -> None:
    assert _run(tmp_path, "def on_step(step, loss, run):\n    NET.seen = step\n    CONFIG['b'] = CONFIG['a']") != ""
    assert (
        _run(tmp_path, "SEEN = []\n\n\ndef on_step(step, loss, run):\n    NET.seen = step\n    SEEN.append(ALPHA)")
        == ""
    )


@pytest.mark.slow
def test_a_callback_comes_after_the_scheduler(tmp_path: Path) -> None:
    """In one process, too, where the last worker ends a step first."""
    scheduler = "def lr_scheduler(optimizer):\n    optimizer.register_step_post_hook(lambda *_: TENSOR.mul_(0.5))"
    assert _run(tmp_path, f"{scheduler}\n\n\ndef on_step(step, loss, run):\n    assert TENSOR == 0.5**step") == ""


@pytest.mark.slow
def test_totals_of_a_minibatch_have_the_new_values(tmp_path: Path) -> None:
    """A loss with weights of classes divides by their sum, which worker 0 makes for all microbatches."""
    build = tmp_path / "build"
    path = write_model(
        tmp_path,
        ("class Net", "WEIGHTS = torch.ones(3)\n\n\nclass Net"),
        ('batch["y"])', 'batch["y"], weight=WEIGHTS)'),
        ("self.norm(x)", "x"),
        ("dropout(torch.tanh(block(x)), 0.1, self.training)", "tanh(block(x))"),
    )
    path.write_text(f"{path.read_text()}\n\ndef on_step(*_):\n    WEIGHTS[1] *= 0.5\n")
    losses = []
    for microbatches in (1, 2):
        options = ("--schedule", "1f1b", "--microbatches", microbatches)
        assert fxpipe("compile", path, "-n", 2, "-o", build, *options).code == 0
        losses.append(fxpipe("run", build, "--steps", 6, "--local", "--json").json["losses"])
    assert losses[1] == pytest.approx(losses[0])


@pytest.mark.slow
def test_without_a_flush_only_data_may_change_tensors_if_checkpoints_are_made(tmp_path: Path) -> None:
    error = _run(
        tmp_path, "def lr_scheduler(optimizer):\n    optimizer.register_step_post_hook(lambda *_: TENSOR.mul_(0.9))",
        "--schedule", "async", "--checkpoint-every", "2",
    )  # fmt: skip
    assert "could not resume exactly" in error
