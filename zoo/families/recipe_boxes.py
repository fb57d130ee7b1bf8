"""Recipes on boxes and pixels: spots that hold something, images of which a part does not count."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.recipe import Recipe
from families.recipe_parts import (
    CLASSES,
    FEATURES,
    OF_THE_BATCH,
    SIZE,
    WIDTH,
    classified,
    drawn,
    images,
    kept,
    labelled,
    layers,
    number,
    pooled,
    segmented,
)

SPOTS, OBJECTS = 10, 4  # of a detector: places it looks at, and boxes of an image at most


class Detector(nn.Module):
    """Images to a class and a box for each spot."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.classes, self.boxes = (
            layers(WIDTH),
            nn.Linear(WIDTH, SPOTS * CLASSES),
            nn.Linear(WIDTH, SPOTS * 4),
        )
        self.centres = nn.Linear(WIDTH, SPOTS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.body(x).tanh()
        boxes = self.boxes(x).unflatten(1, (SPOTS, 4)).sigmoid()
        return self.classes(x).unflatten(1, (SPOTS, CLASSES)), boxes, self.centres(x)


def spotted(step: int) -> Any:
    """For each spot: a class, 0 if there is nothing, −1 if it does not count; and a box."""
    there = kept(step, SPOTS)
    wanted = torch.where(there, torch.randint(1, CLASSES, (SIZE, SPOTS)), 0)
    return (
        torch.randn(SIZE, FEATURES),
        wanted.masked_fill(torch.rand(SIZE, SPOTS) < 0.1, -1),
        torch.rand(SIZE, SPOTS, 4),
    )


def retina(model: nn.Module, batch: Any) -> Tensor:
    """RetinaNet (Lin et al., 2017): over the number of spots that hold something."""
    x, wanted, boxes = batch
    scores, found, _ = model(x)
    there, counts = wanted > 0, (wanted >= 0).unsqueeze(-1)
    truth = number(F.one_hot(wanted.clamp(min=0), CLASSES))
    chance = scores.sigmoid()
    told = F.binary_cross_entropy_with_logits(scores, truth, reduction="none")
    focal = (told * (1 - torch.where(truth > 0, chance, 1 - chance)) ** 2 * counts).sum()
    place = (F.smooth_l1_loss(found, boxes, reduction="none", beta=0.1).sum(-1) * there).sum()
    return (focal + place) / there.sum().clamp(min=1)


def centred(model: nn.Module, batch: Any) -> Tensor:
    """FCOS (Tian et al., 2019): boxes are weighed by how near to the middle they should be, and divided by that."""
    x, wanted, boxes = batch
    scores, found, centre = model(x)
    there = number(wanted > 0)
    near = (boxes.amin(-1) / boxes.amax(-1)).sqrt()
    told = F.cross_entropy(scores.flatten(0, 1), wanted.flatten(), ignore_index=-1, reduction="sum")
    place = ((found - boxes).abs().sum(-1) * there * near).sum() / (there * near).sum().clamp(min=1e-6)
    middle = (F.binary_cross_entropy_with_logits(centre, near, reduction="none") * there).sum()
    return (told + middle) / there.sum().clamp(min=1) + place


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Generalised intersection over union (Rezatofighi et al., 2019) of boxes [..., (x, y, width, height)]."""
    begin, end = (torch.cat([b[..., :2], b[..., :2] + b[..., 2:] + 1e-3], -1) for b in (one, other))
    inner = (torch.minimum(begin[..., 2:], end[..., 2:]) - torch.maximum(begin[..., :2], end[..., :2])).clamp(min=0)
    outer = torch.maximum(begin[..., 2:], end[..., 2:]) - torch.minimum(begin[..., :2], end[..., :2])
    common, hull = inner.prod(-1), outer.prod(-1)
    union = (one[..., 2:] + 1e-3).prod(-1) + (other[..., 2:] + 1e-3).prod(-1) - common
    return common / union - (hull - union) / hull


def objects(step: int) -> Any:
    """Each image's objects, at most so many, with the spots that are to find them, and which of them are real."""
    real = kept(step, OBJECTS)
    spot = torch.stack([torch.randperm(SPOTS)[:OBJECTS] for _ in range(SIZE)])
    return (
        torch.randn(SIZE, FEATURES),
        torch.randint(1, CLASSES, (SIZE, OBJECTS)),
        torch.rand(SIZE, OBJECTS, 4),
        spot,
        real,
    )


def matched(model: nn.Module, batch: Any) -> Tensor:
    """DETR (Carion et al., 2020), with the data loader's matching: nothing weighs a tenth, boxes count as many."""
    x, classes, boxes, spot, real = batch
    scores, found, _ = model(x)
    wanted = torch.zeros(len(x), SPOTS, dtype=torch.long).scatter(1, spot, torch.where(real, classes, 0))
    weights = torch.ones(CLASSES)
    weights[0] = 0.1
    told = F.cross_entropy(scores.transpose(1, 2), wanted, weight=weights)
    mine = found.gather(1, spot[..., None].expand(-1, -1, 4))
    count = real.sum().clamp(min=1)
    apart = ((mine - boxes).abs().sum(-1) * real).sum() / count
    return told + 5 * apart + 2 * ((1 - overlap(mine, boxes)) * real).sum() / count


def overlapping(model: nn.Module, batch: Any) -> Tensor:
    """Boxes weigh what their classes are sure of: the loss divides by a sum of what the model says."""
    x, wanted, boxes = batch
    scores, found, _ = model(x)
    sure = scores.detach().softmax(-1).amax(-1) * (wanted > 0)
    return ((found - boxes).abs().sum(-1) * sure).sum() / sure.sum().clamp(min=1e-6)


def dice(model: nn.Module, batch: Any, dims: tuple[int, ...]) -> Tensor:
    """Less the overlap of each class, of what `dims` add up (Milletari et al., 2016)."""
    x, wanted = batch
    counts = number(wanted != 255).unsqueeze(1)
    found = model(x).softmax(1) * counts
    truth = number(F.one_hot(wanted.clamp(max=CLASSES - 1), CLASSES)).permute(0, 3, 1, 2) * counts
    both, all_ = (found * truth).sum(dims), (found + truth).sum(dims)
    return 1 - ((2 * both + 1) / (all_ + 1)).mean()


def hardest(model: nn.Module, batch: Any, of_image: bool) -> Tensor:
    """Only the worst quarter of the pixels, of each image or of the batch."""
    lost = F.cross_entropy(model(batch[0]), batch[1].clamp(max=CLASSES - 1), reduction="none")
    lost = lost.flatten(1) if of_image else lost.flatten()
    return lost.topk(lost.shape[-1] // 4, -1).values.mean()


def weighed_edges(model: nn.Module, batch: Any) -> Tensor:
    """U-Net's map of weights (Ronneberger et al., 2015)."""
    x, wanted = batch
    weights = number(wanted != 255) * (1 + x[:, 0].abs())
    return (F.cross_entropy(model(x), wanted.clamp(max=CLASSES - 1), reduction="none") * weights).sum() / weights.sum()


def supervised(model: nn.Module, batch: Any) -> Tensor:
    """Each layer has a head of its own (Lee et al., 2015)."""
    x, wanted = batch
    found = torch.zeros(())
    for k in range(3):
        x = F.relu(model[f"layer{k}"](x))
        found = found + 0.5 ** (2 - k) * F.cross_entropy(model[f"head{k}"](x), wanted, ignore_index=255)
    return found


def deep() -> nn.ModuleDict:
    made = {f"layer{k}": nn.Conv2d(3 if k == 0 else WIDTH, WIDTH, 3, 1, 1) for k in range(3)}
    return nn.ModuleDict({**made, **{f"head{k}": nn.Conv2d(WIDTH, CLASSES, 1) for k in range(3)}})


def _of(name: str, loss: Any, batch: Any, model: Callable[[], nn.Module], **more: Any) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


_boxes = functools.partial(_of, model=Detector)
_maps = functools.partial(_of, batch=drawn, model=lambda: images(CLASSES))

RECIPES = (
    _of("batch_norm", classified, labelled, lambda: pooled(CLASSES, nn.BatchNorm2d),
        differs=(r"^0\.1$", "batch norm normalises each microbatch by itself, which compile notes")),
    _of("batch_norm_asleep", segmented, drawn, lambda: images(CLASSES, lambda n: nn.BatchNorm2d(n).eval())),
    _boxes("retina_boxes", retina, spotted),
    _boxes("centred_boxes", centred, spotted),
    _boxes("matched_boxes", matched, objects),
    _boxes("overlapping_boxes", overlapping, spotted,
           differs=("clamp .* is not linear", OF_THE_BATCH)),
    _maps("ignored_pixels", segmented),
    _maps("weighed_pixels", weighed_edges),
    _maps("dice_of_images", functools.partial(dice, dims=(2, 3))),
    _maps("dice_of_batch", functools.partial(dice, dims=(0, 2, 3)), differs=("(?s).", OF_THE_BATCH)),
    _maps("hardest_pixels", functools.partial(hardest, of_image=True)),
    _maps("hardest_of_batch", functools.partial(hardest, of_image=False), differs=("topk", OF_THE_BATCH)),
    _of("deep_supervision", supervised, drawn, deep),
)  # fmt: skip
