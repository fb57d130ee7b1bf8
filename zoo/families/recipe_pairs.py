"""Recipes that compare samples: with each other, with proxies, with a memory, with what a teacher says."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.recipe import Recipe, called
from families.recipe_models import ProxyAnchor, follow
from families.recipe_parts import CLASSES, FEATURES, SIZE, kept, layers, number

WIDTH = 6
OTHERS = "each sample is compared with the others of its batch"
CHANGES = "reads .*, which every microbatch changes"
LATER = "each microbatch changes what the next one reads, and eager changes it once a batch"


def views(step: int) -> tuple[Tensor, Tensor]:
    """Two views of each sample."""
    x = torch.randn(SIZE, FEATURES)
    return x + 0.1 * torch.randn(SIZE, FEATURES), x + 0.1 * torch.randn(SIZE, FEATURES)


def classes(step: int) -> tuple[Tensor, Tensor]:
    return torch.randn(SIZE, FEATURES), torch.randint(0, CLASSES, (SIZE,))


def triplets(step: int) -> tuple[Tensor, ...]:
    return torch.randn(3, SIZE, FEATURES).unbind(0)


def seen(model: nn.Module, x: Tensor) -> Tensor:
    return F.normalize(model(x), dim=-1)


def info_nce(model: nn.Module, batch: Any) -> Tensor:
    one, other = (seen(model, x) for x in batch)
    return F.cross_entropy(one @ other.t() / 0.2, torch.arange(len(one)))


def simclr(model: nn.Module, batch: Any) -> Tensor:
    """Chen et al., 2020."""
    found = seen(model, torch.cat(batch))
    count = len(found) // 2
    near = (found @ found.t() / 0.5).masked_fill(torch.eye(2 * count, dtype=torch.bool), -1e9)
    return F.cross_entropy(near, torch.arange(2 * count).roll(count))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.texts = layers(WIDTH), layers(WIDTH)
        self.scale, self.bias = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.tensor(-1.0))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return seen(self.images, one) @ seen(self.texts, other).t() * self.scale.exp()


def clip(model: nn.Module, batch: Any) -> Tensor:
    """Radford et al., 2021."""
    near = model(*batch)
    own = torch.arange(len(near))
    return (F.cross_entropy(near, own) + F.cross_entropy(near.t(), own)) / 2


def siglip(model: Any, batch: Any) -> Tensor:
    """Zhai et al., 2023."""
    near = model(*batch) + model.bias
    return -F.logsigmoid((2 * torch.eye(len(near)) - 1) * near).sum() / len(near)


def supervised(model: nn.Module, batch: Any) -> Tensor:
    """Khosla et al., 2020."""
    found, alike = seen(model, batch[0]), batch[1][:, None] == batch[1]
    alike = alike & ~torch.eye(len(alike), dtype=torch.bool)
    near = (found @ found.t() / 0.5).masked_fill(torch.eye(len(alike), dtype=torch.bool), -1e9).log_softmax(1)
    return -((near * alike).sum(1) / alike.sum(1).clamp(min=1)).mean()


def hardest(model: nn.Module, batch: Any) -> Tensor:
    """Each with the farthest of its class and the nearest of the others (Hermans et al., 2017)."""
    found, alike = model(batch[0]), batch[1][:, None] == batch[1]
    apart = (found[:, None] - found).square().sum(-1)
    near, far = (apart + 1e3 * alike).amin(1), (apart * alike).amax(1)
    return F.relu(far - near + 0.5).mean()


def angles(model: Any, batch: Any) -> Tensor:
    """ArcFace (Deng et al., 2019): an angle is added to each sample's own class."""
    near = (seen(model.body, batch[0]) @ F.normalize(model.proxies, dim=-1).t()).clamp(-0.999, 0.999)
    wider = torch.cos(torch.acos(near) + 0.3)
    return F.cross_entropy(8 * torch.where(F.one_hot(batch[1], CLASSES) > 0, wider, near), batch[1])


def proxies(model: Any, batch: Any) -> Tensor:
    """ProxyNCA (Movshovitz-Attias et al., 2017)."""
    apart = torch.cdist(seen(model.body, batch[0]), F.normalize(model.proxies, dim=-1)).square()
    return F.cross_entropy(-apart, batch[1])


def anchored(model: Any, batch: Any) -> Tensor:
    return ProxyAnchor(model.proxies)(model.body(batch[0]), batch[1])


def centred(model: Any, batch: Any) -> Tensor:
    """Center loss (Wen et al., 2016)."""
    found = model.body(batch[0])
    near = (found - model.proxies[batch[1]]).square().sum(1).clamp(1e-6, 1e6).mean()
    return F.cross_entropy(found @ model.proxies.t(), batch[1]) + 0.1 * near


class Proxies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.proxies = layers(WIDTH), nn.Parameter(torch.randn(CLASSES, WIDTH))


def barlow(model: nn.Module, batch: Any) -> Tensor:
    """Zbontar et al., 2021."""
    one, other = ((y - y.mean(0)) / y.std(0) for y in map(model, batch))
    related = one.t() @ other / len(one)
    wrong = (related - torch.eye(WIDTH)).square()
    return wrong.diagonal().sum() + 0.01 * (wrong.sum() - wrong.diagonal().sum())


def vicreg(model: nn.Module, batch: Any) -> Tensor:
    """Bardes et al., 2022."""
    one, other = map(model, batch)
    found = F.mse_loss(one, other)
    for y in (one, other):
        y = y - y.mean(0)
        varied = y.t() @ y / (len(y) - 1)
        found = found + F.relu(1 - (y.var(0) + 1e-4).sqrt()).mean()
        found = found + (varied.square().sum() - varied.diagonal().square().sum()) / WIDTH
    return found


class Predictor(nn.Module):
    """SimSiam (Chen and He, 2021), normalised by layers."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.predict = nn.Sequential(layers(WIDTH), nn.LayerNorm(WIDTH)), layers(WIDTH, WIDTH)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        y = self.body(torch.cat([one, other]))
        said, meant = self.predict(y).chunk(2), y.detach().chunk(2)
        near = [F.cosine_similarity(said[k], meant[1 - k]).mean() for k in range(2)]
        return -(near[0] + near[1]) / 2


class Follower(nn.Module):
    """BYOL (Grill et al., 2020): the teacher follows within the step."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.predict = layers(WIDTH), layers(WIDTH, WIDTH)
        self.teacher = layers(WIDTH).requires_grad_(False)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            follow(self.teacher, self.body, 0.1)
            meant = self.teacher(other)
        return 2 - 2 * F.cosine_similarity(self.predict(self.body(one)), meant).mean()


class Begun(Follower):
    """As it is begun: the teacher is a copy of the student, so that following changes nothing in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)


class Queue(nn.Module):
    """MoCo (He et al., 2020): the keys of earlier batches are in a queue."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(WIDTH)
        self.key = copy.deepcopy(self.body).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(3 * SIZE, WIDTH)))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        queries = seen(self.body, one)
        with torch.no_grad():
            follow(self.key, self.body, 0.1)
            keys = seen(self.key, other)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().t()], 1) / 0.2
        self.queue = torch.cat([keys, self.queue[: -len(keys)]])
        return F.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long))


class Bank(nn.Module):
    """Each sample of the data has its place in a memory (Wu et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers(WIDTH)
        self.register_buffer("bank", F.normalize(torch.randn(6 * SIZE, WIDTH)))

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        found = seen(self.body, x)
        loss = F.cross_entropy(found @ self.bank.clone().t() / 0.2, place)
        with torch.no_grad():
            self.bank = self.bank.index_copy(0, place, F.normalize(0.5 * self.bank[place] + 0.5 * found))
        return loss


class Centred(nn.Module):
    """DINO (Caron et al., 2021): what the teacher says is centred by what it said of earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.teacher = layers(WIDTH), layers(WIDTH).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            said = self.teacher(one)
            meant = ((said - self.centre) / 0.1).softmax(-1)
            self.centre = 0.9 * self.centre + 0.1 * said.mean(0)
        return -(meant * (self.body(other) / 0.2).log_softmax(-1)).sum(-1).mean()


class MeanTeacher(nn.Module):
    """Tarvainen and Valpola, 2017, whose teacher follows outside of the step, and so stands still here."""

    def __init__(self) -> None:
        super().__init__()
        self.student = layers(CLASSES)
        self.teacher = layers(CLASSES).requires_grad_(False)


def consistent(model: Any, batch: Any) -> Tensor:
    """Only some samples have a class; all must be told alike from both views."""
    one, other, y = batch
    with torch.no_grad():
        meant = model.teacher(other).softmax(-1)
    found = model.student(one)
    return F.cross_entropy(found, y, ignore_index=-1) + 2 * F.mse_loss(found.softmax(-1), meant)


def some_known(step: int) -> Any:
    y = torch.randint(0, CLASSES, (SIZE,)).masked_fill(~kept(step), -1)
    return *views(step), y.index_fill(0, torch.tensor([SIZE - 1]), 0)


def sure(model: nn.Module, batch: Any) -> Tensor:
    """FixMatch (Sohn et al., 2020): what the model is sure of is learned from the other view."""
    one, other, y = batch
    weak, strong = model(torch.cat([one, other])).chunk(2)
    said = weak.detach().softmax(-1).max(-1)
    told = F.cross_entropy(strong, said.indices, reduction="none") * (said.values > 0.25)
    return F.cross_entropy(weak, y, ignore_index=-1) + told.mean()


def sampled(model: Any, batch: Any) -> Tensor:
    """Words, their neighbours and words that are none (Mikolov et al., 2013); some neighbours are missing."""
    words, near, far, there = batch
    own = model[0](words)
    close = F.logsigmoid((own * model[1](near)).sum(-1))
    apart = F.logsigmoid(-(model[1](far) @ own[..., None])[..., 0]).sum(1)
    return -((close + apart) * there).sum() / there.sum()


def words(step: int) -> Any:
    return (
        *torch.randint(0, 30, (2, SIZE)).unbind(0),
        torch.randint(0, 30, (SIZE, 4)),
        number(kept(step) | (torch.arange(SIZE) == 5)),
    )


def translated(model: Any, batch: Any) -> Tensor:
    """TransE (Bordes et al., 2013)."""
    head, kind, tail, wrong = batch
    moved = model[0](head) + model[1](kind)
    return F.margin_ranking_loss(
        (moved - model[0](tail)).norm(dim=1), (moved - model[0](wrong)).norm(dim=1), -torch.ones(len(head)), margin=1.0
    )


def preferred(model: Any, batch: Any) -> Tensor:
    """Bayesian personalised ranking (Rendle et al., 2009), with a penalty on the rows that are read."""
    user, liked, other = model[0](batch[0]), model[1](batch[1]), model[1](batch[2])
    told = -F.logsigmoid((user * (liked - other)).sum(-1)).mean()
    return told + 1e-2 * (user.square().sum() + liked.square().sum() + other.square().sum()) / len(user)


def _of(
    name: str, loss: Any, batch: Any, model: Callable[[], nn.Module] = lambda: layers(WIDTH), **more: Any
) -> Recipe:
    return Recipe(f"recipe_{name}", model, loss, batch, **more)


def _tables() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(30, WIDTH), nn.Embedding(30, WIDTH))


def _integers(count: int) -> Callable[[int], Any]:
    return lambda step: torch.randint(0, 30, (count, SIZE)).unbind(0)


_apart = functools.partial(_of, differs=("(?s).", OTHERS))

RECIPES = (
    _apart("info_nce", info_nce, views),
    _apart("simclr", simclr, views),
    _apart("clip", clip, views, TwoTowers),
    _apart("siglip", siglip, views, TwoTowers),
    _apart("supervised_contrast", supervised, classes),
    _apart("hardest_triplets", hardest, classes),
    _of("triplets", lambda m, b: F.triplet_margin_loss(*map(m, b)), triplets),
    _of("siamese", lambda m, b: F.cosine_embedding_loss(m(b[0]), m(b[1]), b[2]),
        lambda step: (*views(step), torch.randint(0, 2, (SIZE,)) * 2 - 1)),
    _of("arc_margin", angles, classes, Proxies),
    _of("proxy_nca", proxies, classes, Proxies),
    _apart("proxy_anchors", anchored, classes, Proxies),
    _of("centre_loss", centred, classes, Proxies),
    _apart("barlow_twins", barlow, views),
    _apart("vicreg", vicreg, views),
    _of("simsiam", called, views, Predictor),
    _of("byol", called, views, Follower, differs=("which every microbatch changes", LATER)),
    _of("byol_begun", called, views, Begun, differs=("which every microbatch changes", LATER)),
    _of("moco", called, views, Queue, differs=("which every microbatch changes", LATER)),
    _of("memory_bank", called, lambda step: (torch.randn(SIZE, FEATURES), torch.randperm(6 * SIZE)[:SIZE]), Bank,
        differs=("which every microbatch changes", LATER)),
    _of("dino_centre", called, views, Centred, differs=("which every microbatch changes", LATER)),
    _of("mean_teacher", consistent, some_known, MeanTeacher),
    _of("fixmatch", sure, some_known, lambda: layers(CLASSES)),
    _of("negative_words", sampled, words, _tables),
    _of("translated_entities", translated, _integers(4), _tables),
    _of("personal_ranking", preferred, _integers(3), _tables),
)  # fmt: skip
