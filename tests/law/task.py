"""What a case trains: the hooks of its model file."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import packed_tensors
import padded_texts
import pretended_device
import small_models
import torch
import towers
from case import Case
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

EPOCH = 3
"""Batches of an epoch."""

FACTOR = 0.5
"""Of learning rates, where runs set it; the model file has 1."""

FADED = 0.8
"""The factor on a loss that falls with every step."""

GENTLE = 0.4
"""The factor on the rates of some parameters."""

LAYERS = 6
WIDTHS = (4, 5)


class Chain(nn.Module):
    """What the direct simulation of `papers` computes by hand."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(WIDTHS[k % 2], WIDTHS[(k + 1) % 2]) for k in range(LAYERS)]
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(i, o), nn.Tanh()) for i, o in pairs])

    def forward(self, x: Tensor, first: Any = None) -> Tensor:
        """With a factor on the values of the first layer, whose backward reads it with later forwards on the way."""
        for place, layer in enumerate(self.layers):
            x = layer(x) if place or first is None else layer(x) * first
        return x


def _squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _pairs(size: int) -> Any:
    return torch.randn(size, WIDTHS[0]), torch.rand(size, WIDTHS[LAYERS % 2]) - 0.5


class Skips(nn.Module):
    """Batch norm, so buffers with new values; and values that jump over stages."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU())
        self.down = nn.Sequential(nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.BatchNorm2d(6), nn.GELU())
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 4, 2, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = self.stem(x)
        b = self.down(a)
        c = self.up(torch.cat([F.gelu(self.middle(b)), b], 1))
        return self.head(torch.cat([c, a], 1).mean((2, 3)))


def one_draw(name: str, draw: Callable[[], Tensor]) -> Tensor:
    """What is drawn for the whole batch; `name` is the stages' for it."""
    return draw()


class Dropped(nn.Module):
    """Random numbers in every part, of samples and of the whole batch, some of them drawn again by backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2)) for _ in range(3)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        noise = one_draw("randn", lambda: torch.randn(6, dtype=x.dtype, device=x.device)) if self.training else 0
        x = F.dropout(self.first(x) + noise, 0.1, self.training)
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(self._scaled, block, x, use_reentrant=False) if i == 1 else block(x))
        return self.head(x)

    def _scaled(self, block: nn.Module, x: Tensor) -> Tensor:
        """With stochastic depth."""
        return (
            block(x) * (one_draw("rand", lambda: torch.rand((), device=x.device)) < 0.7) if self.training else block(x)
        )


class Functions(nn.Module):
    """Backwards of one's own, and blocks that backward computes again: reentrant ones and others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3)])
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = small_models.ScaledSquare.apply(self.first(x))
        for i, block in enumerate(self.blocks):
            x = torch.tanh(x + checkpoint(block, x, use_reentrant=i % 2 == 1))
        return self.head(x)


class Attention(nn.Module):
    """One kernel of torch; on CUDA it leaves its seed in the CPU's memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, -1)
        dropout = 0.1 if self.training else 0.0
        return x + F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True).squeeze(1)


class Recurrent(nn.Module):
    """With a state that goes on from microbatch to microbatch, until `reset`; its layer reads what begins unaligned."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mood", torch.zeros(5))
        self.embed = nn.Embedding(17, 5)
        self.layers = nn.ModuleList([nn.LSTM(5, 5)])
        self.head = nn.Linear(5, 5)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids.t()) + self.mood
        self.mood = 0.5 * self.mood + x.detach().mean((0, 1))
        x = x[1:]
        for layer in self.layers:
            x = x + layer(x)[0]
        return self.head(x[-1])


def _attending() -> nn.Module:
    blocks = [Attention(6) for _ in range(3)]
    return nn.Sequential(nn.Embedding(17, 6), *blocks, nn.Flatten(), nn.Linear(18, 5))


def forget(model: Recurrent) -> None:
    model.mood.zero_()


def counted(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Any]]:
    """A loss with metrics, whose outliers and weights of classes are what the whole batch makes them."""
    scores, classes = model(batch[0]), batch[1]
    right = (scores.argmax(1) == classes).double()
    size = batch[0].norm(dim=1)
    classes = torch.where(size > 1.2 * size.mean(), -100, classes)
    count = F.one_hot(classes.clamp(min=0), 5).sum(0)
    loss = F.cross_entropy(scores, classes, weight=(len(count) / (1 + count)).to(scores.dtype))
    return loss, {"accuracy": right.mean(), "right": right.sum(), "half": 0.5}


def tokens(batch: Any) -> Any:
    """How many labels of a batch count."""
    return padded_texts.tokens(batch.get("given", batch))


def opaque(model: nn.Module, batch: Any) -> Tensor:
    """The mean over all labels that count, in a way that is not followed: it takes `loss_weight`."""
    found = model(batch["ids"], batch["mask"]).flatten(0, 1)
    each = F.cross_entropy(found, batch["labels"].flatten(), reduction="none")
    return each.sort().values.sum() / padded_texts.tokens(batch)


def _class_of(name: str) -> small_models.Case:
    return small_models.CASES[name]


def _words(size: int) -> Any:
    return torch.randint(0, 17, (size, 3)), torch.randint(0, 5, (size,))


CLASSIFY, IMAGES, VECTORS = _class_of("conv").loss, _class_of("conv").batch, _class_of("function").batch
STEP = (_class_of("gpt").loss, _class_of("gpt").batch)
GPT = ("tok", "blocks.0", "norm", "head")
FUNCTIONS = ("first", "blocks.0", "blocks.1", "blocks.2", "head")
MODELS = {
    case.name: case
    for case in (
        small_models.Case("chain", Chain, _squared, _pairs, tuple(f"layers.{i}" for i in range(LAYERS))),
        small_models.Case("gpt", lambda: small_models.GPT(depth=1), *STEP, GPT),
        small_models.Case("dropout", Dropped, CLASSIFY, VECTORS, FUNCTIONS),
        small_models.Case("gpt-dropout", lambda: small_models.GPT(depth=1, dropout=0.2), *STEP, GPT),
        small_models.Case("attention-dropout", _attending, CLASSIFY, _words, tuple("01235")),
        small_models.Case("conv", Skips, CLASSIFY, IMAGES, ("stem", "down", "middle", "up", "head")),
        small_models.Case("lstm", Recurrent, CLASSIFY, _words, ("embed", "layers.0", "head")),
        small_models.Case("function", Functions, counted, VECTORS, FUNCTIONS),
        _class_of("dict"),
        small_models.Case("packed", packed_tensors.adapted, CLASSIFY, VECTORS, tuple("0124")),
        small_models.Case("towers", lambda: towers.Towers(in_turns=True), towers.loss, towers.batch_of, towers.CUTS),
        small_models.Case("texts", padded_texts.Reader, padded_texts.loss,
                          lambda size: padded_texts.batch_of(8, samples=size),
                          ("embed", "query", "key", "value", "norm", "head")),
    )
}  # fmt: skip


class Own(Optimizer):
    """Not of torch.optim: each weight goes by a softened sign of its gradient."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / (0.1 + parameter.grad.abs())


OPTIMIZERS: dict[str, Callable[[list[Any]], Any]] = {
    "momentum": lambda named: SGD([p for _, p in named], lr=0.05, momentum=0.9, weight_decay=1e-3),
    "nesterov": lambda named: SGD([p for _, p in named], lr=0.05, momentum=0.9, nesterov=True),
    "sgd": lambda named: SGD([p for _, p in named], lr=0.1, weight_decay=0.1),
    "adamw": lambda named: AdamW([p for _, p in named], lr=0.02, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2),
    "own": lambda named: Own([p for _, p in named], lr=0.01),
    "two": lambda named: two(named),
}
RATES: dict[str, Callable[[Optimizer], Any]] = {
    "falling": lambda optimizer: LambdaLR(optimizer, falling),
    "epoch": lambda optimizer: (StepLR(optimizer, 1, 0.5), "epoch"),
}


def two(named: list[Any]) -> list[Optimizer]:
    """One for matrices and one for vectors, where a worker has any."""
    matrices, vectors = [p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim <= 1]
    made = [SGD(matrices, lr=0.05, momentum=0.9)] if matrices else []
    return [*made, *([AdamW(vectors, lr=0.01, eps=1e-3)] if vectors else [])]


class Gentle(nn.Parameter):
    """A parameter with a lower rate, if what hangs on it says so."""

    kind: dict[str, bool]

    @property
    def factor(self) -> float:
        return GENTLE if self.kind["slow"] else 1.0


def gentle(optimizer: Optimizer) -> None:
    """Put such parameters into a group of their own; one without any, too, so that workers have as many groups."""
    (group,) = optimizer.param_groups
    own = [p for p in group["params"] if isinstance(p, Gentle)]
    group["params"] = [p for p in group["params"] if not isinstance(p, Gentle)]
    optimizer.add_param_group({**group, "params": own, "lr": group["lr"] * (own[0].factor if own else GENTLE)})


def falling(step: int) -> float:
    return 1 / (1 + 0.3 * step)


class Fading(list[Any]):
    """Batches that make the loss weaker as they are read."""

    def __init__(self, task: Task) -> None:
        super().__init__(task.train_data())
        self.task = task

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.task.fade()
            yield batch


class Task:
    """The hooks of a case."""

    def __init__(self, case: Case) -> None:
        self.case, self.of = case, MODELS[case.model]
        # What the step reads of the case: it is captured once for all cases that are alike in that.
        self.fades, self.plain = case.fades, case.batches == "plain"
        self.weighed = case.model == "texts" and case.shapes != "padded"

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with self.device:
            made = self.of.model()
        return self.marked(made if self.case.precision == "params" else made.to(self._dtype))

    def marked(self, model: nn.Module) -> nn.Module:
        """The model, with what hangs on its parameters; a deep copy of a model has lost it."""
        for parameter in model.parameters() if self.case.attributes else ():
            if parameter.ndim <= 1:
                parameter.__class__, parameter.kind = Gentle, {"slow": True}
        return model

    @property
    def device(self) -> torch.device:
        """Of the model and the batches."""
        return torch.device("cpu" if self.case.device == "cpu" else pretended_device.NAME)

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = opaque if self.weighed else self.of.loss
        given = batch["given"] if self.plain else batch
        if self.fades and self.case.model == "chain":
            found: Any = F.mse_loss(model(given[0], self.strength), given[1])
        else:
            found = loss(model, given)
        factor = batch["rise"] / 2 + batch["step"] ** 2 if self.plain else 1
        factor = factor * self.strength if self.fades else factor
        if not (self.plain or self.fades):
            return found
        return (found[0] * factor, found[1]) if isinstance(found, tuple) else found * factor

    @functools.cached_property
    def strength(self) -> Any:
        """A factor on the loss, which hooks change."""
        return 1.0 if self.case.state == "fixed" else torch.ones((), device=self.device)

    def fade(self, *_: Any) -> None:
        """What a hook does between steps."""
        self.strength *= FADED

    def fading_data(self) -> Fading:
        return Fading(self)

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers."""
        return "dropout" in self.case.model

    def train_data(self) -> list[Any]:
        if self.case.shapes == "padded":
            lengths = (5, 8, 6, 3, 7, 12)
            return self._with_plain([padded_texts.batch_of(n, seed, samples=8) for seed, n in enumerate(lengths)])
        size = self.case.batch
        sizes = {"last": [size, size, size // 2], "new": [size] * 3 + [size // 2] + [size] * 2}.get(self.case.shapes)
        torch.manual_seed(1)
        return self._with_plain([self._typed(self.of.batch(n)) for n in sizes or [size] * EPOCH])

    def eval_data(self) -> list[Any]:
        torch.manual_seed(2)
        return self._with_plain([self._typed(self.of.batch(n)) for n in (self.case.batch, self.case.batch // 2)])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = self.loss(model, batch)
        named = {"loss": found[0], **found[1]} if isinstance(found, tuple) else {"loss": found}
        return named | ({"each": torch.stack([named["loss"], -named["loss"]])} if self.gathers else {})

    @property
    def gathers(self) -> bool:
        return self.case.evaluation == "often"

    def metrics_of_all(self, gathered: dict[str, list[Tensor]]) -> dict[str, float]:
        """A number that depends on the order of the batches."""
        return {"in order": sum(n * float(each[0] - each[1]) for n, each in enumerate(gathered["each"], start=1))}

    def optimizer(self, named: list[Any], factor: float | None = None) -> Any:
        """With its rates times a factor; None: what the case's runs set."""
        made = OPTIMIZERS[self.case.optimizer](named)
        for each in as_list(made) if self.case.attributes else ():
            gentle(each)
        if factor is None:
            factor = FACTOR if self.case.rate == "set" else 1.0
        for group in (group for each in as_list(made) for group in each.param_groups):
            group["lr"] *= factor
        return made

    def _with_plain(self, batches: list[Any]) -> list[Any]:
        batches = pytree.tree_map_only(Tensor, lambda value: value.to(self.device), batches)
        if self.case.batches == "tensors":
            return batches
        names = (["a.png"], [], ["b.png", "c.png"])
        return [
            {
                "given": batch,
                "names": names[i % 3],
                "rise": min(2, 0.3 * i),
                "step": i % 2,
                "seen": torch.arange(i, device=self.device),
            }
            for i, batch in enumerate(batches)
        ]

    def _typed(self, batch: Any) -> Any:
        return pytree.tree_map(
            lambda value: value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value,
            batch,
        )

    @property
    def _dtype(self) -> torch.dtype:
        """Of weights and batches."""
        if self.case.mixed:
            return torch.bfloat16
        return {"float64": torch.float64, "bfloat16": torch.bfloat16}.get(self.case.precision, torch.float32)

    def hooks(self) -> dict[str, Any]:
        """What a model file of this case defines; from now on, this process has its device."""
        if self.case.device != "cpu":
            pretended_device.set_up(narrow=self.case.device == "narrow")
        found: dict[str, Any] = {name: getattr(self, name) for name in ("model", "loss", "train_data", "optimizer")}
        if self.case.rate in RATES:
            found["lr_scheduler"] = RATES[self.case.rate]
        if self.case.evaluation != "none":
            found |= {"eval_data": self.eval_data, "metrics": self.metrics}
            found |= {"metrics_of_all": self.metrics_of_all} if self.gathers else {}
        if self.case.fades:
            _ = self.strength
            found |= {"train_data": self.fading_data} if self.case.state == "data" else {"on_step": self.fade}
        if self.case.shapes == "padded":
            found |= {"pad": padded_texts.PAD, "pad_to": 8}
        if self.weighed:
            found["loss_weight"] = tokens
        if self.case.model == "lstm":
            found["reset"] = forget
        return found


def as_list(made: Any) -> list[Optimizer]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def cycled(data: Iterable[Any], steps: int) -> list[Any]:
    """The first batches of as many epochs as it takes."""
    data = list(data)
    return [copy.deepcopy(data[step % len(data)]) for step in range(steps)]
