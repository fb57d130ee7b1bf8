"""How the model of a model file is made, before there is a step to compile. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxpipe.options import option
from fxpipe.settings import pair, pairs, read

if TYPE_CHECKING:
    from torch import nn

    from fxpipe.task.first_batches import FirstBatches
    from fxpipe.task.model_file import Task


@dataclass(frozen=True)
class ModelOptions:
    """How a model is made.

    Attributes:
        device: 'cpu', 'cuda' or 'mps'; None is the model's own.
        seed: of the initial weights.
        meta: parameters get no values, for models larger than memory.
        settings: values for `fxpipe.setting`, each as `name=value`.
        arguments: the model file's own command line.
    """

    device: str | None = option(
        None, choices=("cpu", "cuda", "mps"), help="Device of the workers. [default: the model's]"
    )
    seed: int = option(0, metavar="N", help="Seed for the initial weights.")
    meta: bool = option(
        False, help="Give parameters no values, for a model larger than memory; `fxpipe run` makes or reads them."
    )
    settings: tuple[str, ...] = option(
        (),
        "--set",
        kind=pair,
        metavar="NAME=VALUE",
        help="Value of fxpipe.setting(NAME, …) in the model file; can be repeated.",
    )
    arguments: tuple[str, ...] = ()

    def load(self, path: str | Path) -> Task:
        """The model file, with these settings and arguments."""
        from fxpipe.plan.current import check_known
        from fxpipe.task.captured import read_of
        from fxpipe.task.model_file import load_task

        settings = pairs(self.settings)
        task = load_task(path, settings, self.arguments)
        reads = read_of(Path(path))
        if reads is None or not reads.unnamed:  # else it may later read one whose name is not in the text
            check_known(settings, {*read(), *(reads.settings if reads else ())})
        return task

    def make(self, task: Task) -> tuple[nn.Module, Any]:
        """The model, and the first batch of its training data."""
        model, first = self.make_with(task, 1)
        return model, first.batches[0]

    def make_with(
        self, task: Task, count: int, between: Callable[[], None] = lambda: None
    ) -> tuple[nn.Module, FirstBatches]:
        """The model, and the first batches of its training data, at most `count`; only the first is on the device.
        `between` is called when the model is made."""
        import torch

        from fxpipe.task.first_batches import buffers_kept
        from fxpipe.task.meta import on_meta, to_device

        torch.manual_seed(self.seed)
        model = on_meta(task.model).model if self.meta else task.model()
        between()
        with buffers_kept(model):
            first = task.first(count)
        if self.device is None:
            return model, first
        model, example = to_device(self.device, model, first.batches[0])
        return model, replace(first, batches=[example, *first.batches[1:]])
