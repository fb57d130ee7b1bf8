"""What moves units in a run: a model file, whose runs last until it is compiled again, and the signs of processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fxpipe.cli.cost_options import CostOptions
from fxpipe.cli.model_build import build_model
from fxpipe.lowering.options import CompileOptions
from fxpipe.observe.pulse import Signs, Status
from fxpipe.task.model_file import load_task
from fxpipe.task.model_options import ModelOptions

MODEL = """
import glob, itertools, os, signal, time
import torch
from torch import nn
from fxpipe.runtime.wires.throttled import SlowDirection

HERE = os.path.dirname(__file__)
put = SlowDirection.put

def put_slowly(self, say, size, turn, now):
    put(self, say, size * (100 if os.path.exists(HERE + "/slow-link") else 1), turn, now)

if "RANK" in os.environ:
    SlowDirection.put = put_slowly
    if os.path.exists(HERE + "/speeds"):  # under torchrun, where a test can change nothing else
        from fxpipe.runtime.process import better_cuts
        better_cuts.Window.speeds, better_cuts.SAMPLES = lambda *_: (1.0, 0.25), 1

    if os.path.exists(HERE + "/full"):
        from fxpipe.checkpoint import shard

        def no_room(*_):
            os.makedirs(HERE + "/out/checkpoints/step-none", exist_ok=True)
            raise OSError(28, "No space left on device")

        shard.write_shard = no_room

def model():
    torch.manual_seed(1)
    pairs = itertools.pairwise({widths})
    return nn.Sequential(*(layer for pair in pairs for layer in (nn.Linear(*pair), nn.Tanh()))).double()

def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def batches(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return (tuple(torch.randn(8, 12, dtype=torch.float64, generator=generator) for _ in range(2)) for _ in range(count))

class Data:
    def __len__(self):
        return {steps}

    def __iter__(self):
        for number, batch in enumerate(batches({steps}, 2)):
            slow = os.path.exists(HERE + "/slow") and not glob.glob(HERE + "/out/checkpoints/step-*")
            for _ in range(3000 if slow and number == 200 else 0):  # until other cuts are compiled
                time.sleep(0.0 if glob.glob(HERE + "/out/rebalanced/*/costs.json") else 0.02)
            time.sleep(0.02 * slow)
            yield batch

def train_data():
    return Data()

def optimizer(named):
    back = '"over": true' in os.environ.get("FXPIPE_MOVED", "") or not os.path.exists(HERE + "/out/rebalanced/1")
    if "RANK" in os.environ and os.path.exists(HERE + "/refuse") and not back:
        raise ValueError("not under these cuts")
    return torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)

def metrics(model, batch):
    return {{"loss": (model(batch[0]) - batch[1]).square().mean()}}

def eval_data():
    return list(batches(2, 3))

def on_step(step, loss, run):
    mark = HERE + f"/kill-{{step}}"
    if os.environ.get("RANK") == "1" and os.path.exists(mark):
        os.remove(mark)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def moving_build(
    folder: Path,
    steps: int,
    workers: int = 2,
    widths: Sequence[int] = (12,) * 7,
    bandwidth: str | None = None,
    **options: Any,
) -> Path:
    """A build of the model file, in `folder`, for links of this bandwidth; its runs are to write into
    `folder / "out"`."""
    path = folder / "model.py"
    path.write_text(MODEL.format(steps=steps, widths=widths))
    asked = CompileOptions(**{"workers": workers, "schedule": "1f1b", "microbatches": 2, "cost": "analytic", **options})
    made = build_model(load_task(path), ModelOptions(), asked, CostOptions(bandwidth=bandwidth))
    made.build.save(folder / "build", model_file=path)
    return folder / "build"


def signs(beat: int, step: int, busy: float, now: float, phase: str = "training") -> Signs:
    """Of a process that has been busy for some seconds of those since it began."""
    status = Status(int(now * 1e9), int(busy * 1e9), 0, 0)
    return Signs(phase, step, 0, beat, status, None, None, -1)  # type: ignore[arg-type]
