"""Tensors of the batch whose values the step reads are constants of the build, such as the sizes of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from commands import QUICK
from commands import fxpipe as fxpipe_command
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.builds.build import Build
from fxpipe.errors import BatchError, CaptureError, FxpipeError

SAME = ((1, 2, 3),) * 4
NAME = ["grid"]


class Images(nn.Module):
    """Patches of all images in one tensor, taken apart by the sizes in `grid`, [images, 3]: times, rows and columns."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.places = nn.Parameter(torch.randn(64, 16))

    def forward(self, patches: Tensor, grid: Tensor) -> Tensor:
        places = []
        for times, rows, columns in grid:
            row = torch.arange(rows).unsqueeze(1).expand(-1, columns).flatten()
            column = torch.arange(columns).unsqueeze(0).expand(rows, -1).flatten()
            places.append((row * 8 + column).repeat(times))
        hidden = self.embed(patches) + self.places[torch.cat(places)]
        ends = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0]).cumsum(0)
        ends = F.pad(ends, (1, 0), value=0)
        images = torch.stack([part.tanh().mean(0) for part in hidden.split((ends[1:] - ends[:-1]).tolist())])
        if grid.max() > 5:
            images = images * 2
        return self.head(images)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["patches"], batch["grid"]), batch["y"])


def batch_of(grid: Any = SAME) -> Any:
    sizes = torch.tensor(grid)
    patches = torch.randn(int(sizes.prod(1).sum()), 8, dtype=torch.float64)
    return {"patches": patches, "grid": sizes, "y": torch.randint(0, 4, (len(grid),))}


def images() -> nn.Module:
    torch.manual_seed(0)
    return Images().double()


def built(microbatches: int, grid: Any = SAME, **more: Any) -> Build:
    return fxpipe.compile(
        images(),
        loss,
        batch_of(grid),
        workers=2,
        schedule="1f1b",
        microbatches=microbatches,
        cost="analytic",
        constant_batch=NAME,
        **more,
    )


@pytest.mark.parametrize(
    ("microbatches", "grid"), [(1, SAME), (2, SAME), (4, SAME), (1, ((1, 2, 3), (1, 1, 2), (1, 6, 2)))]
)
def test_steps_that_read_constants_train_as_eager(microbatches: int, grid: Any) -> None:
    build = built(microbatches, grid)
    pipeline = build.local(optimizer=lambda named: torch.optim.SGD([p for _, p in named], 0.1, momentum=0.9))
    model = images()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(4):
        batch = batch_of(grid)
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        torch.testing.assert_close(pipeline.step(batch).double(), value.detach(), rtol=1e-6, atol=0)
    pipeline.flush()
    torch.testing.assert_close(pipeline.state_dict(), dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def test_every_batch_must_have_the_same_constants(tmp_path: Path) -> None:
    build = built(2).save(tmp_path / "build")
    pipeline = fxpipe.load(tmp_path / "build").local()
    pipeline.step(batch_of())
    with pytest.raises(
        BatchError, match=r"batch\['grid'\] is \[\[1, 3, 2\], .* captured as the constant \[\[1, 2, 3\]"
    ):
        pipeline.step(batch_of(((1, 3, 2),) * 4))
    assert [leaf.name for leaf in build.plan.step.batch if leaf.tensor is None] == ["batch['grid']"]


def test_microbatches_must_have_the_same_constants() -> None:
    with pytest.raises(BatchError, match=r"differs between microbatches: .* and ") as error:
        built(2, ((1, 2, 3), (1, 3, 2), (1, 1, 6), (1, 6, 1)))
    assert "--microbatches 1" in str(error.value)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["sizes"], r"constant_batch names sizes, which the batch does not have"),
        (["patches"], r"requires a gradient: float64\[24, 8\]"),
        (["large"], r"is large: float32\[5000\]"),
    ],
)
def test_what_cannot_be_a_constant_is_said(names: list[str], said: str) -> None:
    batch = batch_of() | {"large": torch.zeros(5000)}
    batch["patches"].requires_grad_()
    with pytest.raises(BatchError, match=said):
        fxpipe.capture(images(), loss, batch, constant_batch=names)


def test_without_the_name_it_is_refused() -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        fxpipe.capture(images(), loss, batch_of())


def test_evaluations_have_a_shape_for_every_constant() -> None:
    grids = [SAME, ((1, 3, 2),) * 4, SAME]
    build = built(2, evaluation=(lambda model, batch: {"loss": loss(model, batch)}, [batch_of(g) for g in grids]))
    assert not build.plan.not_evaluated
    assert len(build.plan.evaluations) == 2
    batches = [batch_of(grid) for grid in grids]
    model = images().eval()
    with torch.no_grad():
        expected = sum(float(loss(model, batch)) for batch in batches) / 3
    assert build.local().evaluate(batches)["loss"] == pytest.approx(expected)


def captured(step: Any, known: Tensor) -> Any:
    """The loss that the captured program gives, and the one of eager PyTorch."""
    torch.manual_seed(0)
    model, batch = nn.Linear(4, 4), {"x": torch.randn(6, 4), "known": known}
    expected = step(model, {**batch, "known": known.clone()}).detach()
    program = fxpipe.capture(model, step, batch, constant_batch=["known"])
    node = next(b.node for b in program.batch if b.node)
    found = program.run(values=dict(program.values), batch={node: batch["x"]})[0]
    torch.testing.assert_close(found, expected)
    return program


def _size(model: nn.Module, batch: Any) -> Tensor:
    rows, columns = batch["known"]
    return model(batch["x"]).view(rows, columns, -1).square().mean((1, 2)).sum()


def _slice(model: nn.Module, batch: Any) -> Tensor:
    first, end = batch["known"]
    return model(batch["x"])[first:end].square().sum()


def _written(model: nn.Module, batch: Any) -> Tensor:
    batch["known"].add_(1)
    return model(batch["x"])[: batch["known"].max()].sum() * batch["known"].sum()


def _made_of_numbers(model: nn.Module, batch: Any) -> Tensor:
    scale = torch.tensor([2]).expand(2) * batch["known"]
    return model(batch["x"])[: scale.tolist()[0]].sum()


def _added_up(model: nn.Module, batch: Any) -> Tensor:
    total = torch.tensor(0.0)
    for row in range(batch["known"].min()):
        total += model(batch["x"])[row].sum()
    return total


def _loop(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch["x"])
    for size in batch["known"]:
        if size > 2:
            out = out * size
    return out.sum()


@pytest.mark.parametrize("step", [_size, _slice, _written, _made_of_numbers, _added_up, _loop])
def test_what_is_computed_of_constants_is_known(step: Any) -> None:
    known = torch.tensor([2, 3])
    captured(step, known)
    assert known.tolist() == [2, 3]  # a step that writes into it has a copy


def _read_after_unknown(model: nn.Module, batch: Any) -> Tensor:
    sizes = torch.zeros(4)
    first = sizes[:2]
    sizes[:2] = batch["x"][0, :2]
    return model(batch["x"]).sum() * first.tolist()[0] * batch["known"].sum()


def _statistics(model: nn.Module, batch: Any) -> Tensor:
    mean, variance = torch.zeros(4), torch.ones(4)
    F.batch_norm(batch["x"], mean, variance, training=True)
    return model(batch["x"]).sum() * float(mean[0]) * batch["known"].sum()


@pytest.mark.parametrize("step", [_read_after_unknown, _statistics])
def test_what_unknown_values_are_written_into_is_unknown(step: Any) -> None:
    with pytest.raises(CaptureError, match="depends on the values of a tensor"):
        captured(step, torch.tensor([2, 3]))


MODEL = """
import torch
from torch import nn
{constants}

class Cut(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, length):
        return self.last(self.first(x)[:, : int(length)].mean(1))

def model():
    return Cut()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch["x"], batch["length"]), batch["y"])

def train_data():
    return [{{"x": torch.randn(8, 6, 4), "length": torch.tensor(5), "y": torch.randint(0, 2, (8,))}}] * 3
"""


@pytest.mark.parametrize(
    ("constants", "flags"), [("constant_batch = ['length']", []), ("", ["--constant-batch", "length"])]
)
def test_a_model_file_or_the_command_line_names_them(tmp_path: Path, constants: str, flags: list[str]) -> None:
    (tmp_path / "model.py").write_text(MODEL.format(constants=constants))
    build = tmp_path / "build"
    options = [*QUICK, "--schedule", "1f1b", "--microbatches", 2, "--verify", *flags]
    result = fxpipe_command("compile", tmp_path / "model.py", "-o", build, *options)
    assert result.code == 0, result.err


def test_names_are_a_list(tmp_path: Path) -> None:
    from fxpipe.task.model_file import load_task

    (tmp_path / "model.py").write_text(MODEL.format(constants="constant_batch = 'length'"))
    with pytest.raises(FxpipeError, match="not a list of names"):
        _ = load_task(tmp_path / "model.py").constant_batch
