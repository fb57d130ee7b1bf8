"""What a model of the zoo is, and the losses and batches that many of them share."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, VOCABULARY, LENGTH = 10, 199, 16
VISION = ("torchvision", "PIL")
TIMM = ("timm", "torchvision", "huggingface_hub", "yaml")
TRANSFORMERS = ("transformers",)
DIFFUSERS = ("diffusers",)

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class ZooModel:
    """A model with its step.

    Attributes:
        model: makes the module, with random weights; nothing is downloaded.
        loss: `loss(model, batch)` is the step.
        batch: a minibatch of that many samples.
        size: samples in a minibatch, which is cut into two microbatches.
        needs: packages that `make` imports.
        kind: its heading in the table.
        random: checked with its dropout left on, too.
        constant_batch: the tensors of its batch whose values the step reads.
        refused: what the CaptureError's text must match where no graph can hold the step, and why none can.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Loss
    batch: Callable[[int], Any]
    size: int = 4
    needs: tuple[str, ...] = ()
    kind: str = ""
    random: bool = False
    constant_batch: tuple[str, ...] = ()
    refused: tuple[str, str] | None = None

    def missing(self) -> str | None:
        """Why the model cannot be made here, if it cannot."""
        find_apart_packages()
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed; `make venv` installs it" if absent else None

    def make(self, seed: int = 0) -> tuple[nn.Module, Loss, Any]:
        """The module, the loss function and one minibatch."""
        define_torchvision_ops()
        torch.manual_seed(seed)
        model = self.model()
        return model, self.loss, self.batches(1)[0]

    def batches(self, count: int) -> list[Any]:
        """Minibatches, always the same."""
        torch.manual_seed(1234)
        return [self.batch(self.size) for _ in range(count)]


def find_apart_packages() -> None:
    """Let Python find what `make venv` has put beside the environment's own packages: torchvision and timm.

    They come without what they need, which may replace torch, and so may be for another build of it. Where torchvision
    cannot be imported, transformers must not find it, unless its operators are declared first.
    """
    apart = str(Path(sys.prefix) / "zoo")
    if apart not in sys.path:
        sys.path.append(apart)


@functools.cache
def define_torchvision_ops() -> torch.library.Library | None:
    """Declare what `import torchvision` looks up, where its compiled part is for another build of torch."""
    find_apart_packages()
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return None
    for folder in spec.submodule_search_locations or ():
        for compiled in Path(folder).glob("_C*.so"):
            try:
                torch.ops.load_library(compiled)
            except OSError:
                continue
            return None
    library = torch.library.Library("torchvision", "DEF")  # what it defines lasts as long as it: the cache keeps it
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def classify(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of `model(x)`: of a class for each sample, or for each pixel."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def next_token(model: nn.Module, batch: Any) -> Tensor:
    """Cross entropy of the next token's logits, [samples, length, words]."""
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """The squared error of `model(x)`."""
    x, y = batch
    return F.mse_loss(model(x), y)


def images(pixels: int, classes: int = CLASSES) -> Callable[[int], Any]:
    """Square images [samples, 3, pixels, pixels] with a class each."""
    return lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(0, classes, (size,)))


def segmented(pixels: int, classes: int = CLASSES) -> Callable[[int], Any]:
    """Square images [samples, 3, pixels, pixels] with a class for each pixel."""
    return lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(0, classes, (size, pixels, pixels)))


def videos(frames: int, pixels: int) -> Callable[[int], Any]:
    """Videos [samples, 3, frames, pixels, pixels] with a class each."""
    return lambda size: (torch.randn(size, 3, frames, pixels, pixels), torch.randint(0, CLASSES, (size,)))


def tokens(size: int) -> Any:
    """Short texts and the same one token later: capture unrolls every step of an LSTM."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH // 2 + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def text(size: int) -> Any:
    """Texts for causal language models of transformers, which shift the labels themselves."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def gaps(size: int) -> Any:
    """Padded texts for masked language models of transformers; every third token is to be guessed."""
    ids = torch.randint(5, VOCABULARY, (size, LENGTH))
    present = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (size, 1))
    hidden = present & (torch.arange(LENGTH) % 3 == 1)
    return {
        "input_ids": ids.masked_fill(hidden, 4).masked_fill(~present, 0),
        "attention_mask": present.long(),
        "labels": ids.masked_fill(~hidden, -100),
    }
