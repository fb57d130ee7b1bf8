"""torch.nn.functional at its edges: ties, thresholds met exactly, zeros, what is not finite, ignored targets.

A captured step must give eager PyTorch's loss and gradients there too. `test_operators.py` cuts and trains what is
usual; `zoo/test_layouts.py` goes over layouts in memory.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from captured_steps import differences
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]
INF = float("inf")
MATRIX, IMAGES = (3, 4), (2, 3, 5, 6)
REDUCTIONS = ("mean", "sum", "none")

# ---- values ----


def usual(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ties(shape: Sequence[int], seed: int) -> Tensor:
    """Quarters: equal ones, zeros, and exactly every threshold of the cases."""
    return torch.randint(-12, 13, tuple(shape), generator=torch.Generator().manual_seed(seed)).float() / 4


def zeros(shape: Sequence[int], _: int) -> Tensor:
    return torch.zeros(*shape)


def extremes(shape: Sequence[int], _: int) -> Tensor:
    few = torch.tensor([INF, -INF, 1e30, -1e30, 1e-30, 0.0, -0.0, 88.0, -104.0, 20.0, -20.0, 1.0, -1.0, 0.5, 3.0, -3.0])
    count = torch.Size(shape).numel()
    return few.repeat(count // len(few) + 1)[:count].reshape(tuple(shape))


def undefined(shape: Sequence[int], seed: int) -> Tensor:
    made = usual(shape, seed)
    made.view(-1)[::5] = torch.nan
    return made


FINITE = (usual, ties, zeros)
SOME = (usual, ties, undefined)
ANY = (*FINITE, extremes, undefined)


class Case:
    """A function of tensors that are trained, made of values of each kind, and of others that are given."""

    def __init__(
        self, name: str, function: Function, shapes: Sequence[Sequence[int]], given: Sequence[Tensor], kinds: Any
    ) -> None:
        self.name, self.function, self.shapes, self.given, self.kinds = name, function, shapes, given, kinds

    def differences(self) -> list[str]:
        found = []
        for kind, dtype in itertools.product(self.kinds, (torch.float32, torch.bfloat16)):
            if dtype != torch.float32 and kind is not usual:
                continue
            trained = [kind(shape, seed).to(dtype) for seed, shape in enumerate(self.shapes)]
            given = [t.to(dtype) if t.is_floating_point() else t for t in self.given]
            try:
                wrong = differences(self.function, trained, given)
            except (RuntimeError, NotImplementedError):  # eager has no kernel for the type
                assert dtype == torch.bfloat16
                continue
            found += [f"{self.name} of {kind.__name__} {dtype}: {w}" for w in wrong]
        return found


CASES: dict[str, list[Case]] = {}


def add(
    group: str, name: str, function: Function, *shapes: Sequence[int], given: Any = (), kinds: Any = FINITE
) -> None:
    CASES.setdefault(group, []).append(Case(name, function, shapes, given, kinds))


# ---- activations ----

for name, options in [
    *(
        (n, {})
        for n in ("relu", "relu6", "hardtanh", "elu", "selu", "celu", "leaky_relu", "gelu", "logsigmoid", "hardshrink")
    ),
    *(
        (n, {})
        for n in ("tanhshrink", "softplus", "sigmoid", "tanh", "hardsigmoid", "hardswish", "silu", "mish", "softsign")
    ),
    ("hardtanh", {"min_val": -0.5, "max_val": 0.75}),
    ("elu", {"alpha": 0.5}),
    ("leaky_relu", {"negative_slope": -0.25}),
    ("gelu", {"approximate": "tanh"}),
    ("hardshrink", {"lambd": 0.25}),
    ("softshrink", {"lambd": 0.0}),
    ("softplus", {"beta": 2.0, "threshold": 1.5}),
    ("threshold", {"threshold": 0.5, "value": 20.0}),
    ("softmax", {"dim": 1}),
    ("log_softmax", {"dim": 0}),
    ("softmin", {"dim": 1}),
    ("glu", {"dim": 1}),
    ("normalize", {}),
    ("normalize", {"p": INF}),
    ("gumbel_softmax", {"hard": True}),
    ("dropout", {"p": 0.4}),
    ("dropout", {"p": 1.0}),
    ("alpha_dropout", {"p": 0.4, "training": True}),
    ("rrelu", {"training": True}),
]:
    # The kernel of softshrink itself gives NaN one gradient in the middle of a tensor and another one at its end.
    kinds = (*FINITE, extremes) if name == "softshrink" else ANY
    add("activations", f"{name} {options}", functools.partial(getattr(F, name), **options), MATRIX, kinds=kinds)
add("activations", "prelu", F.prelu, MATRIX, (4,), kinds=ANY)

# ---- element by element, with exact bounds ----

for name, function in {
    "clamp": lambda x: x.clamp(-0.5, 0.75),
    "clamp of crossed bounds": lambda x: x.clamp(1, -1),
    "abs": torch.abs,
    "sqrt": torch.sqrt,
    "power of 0": lambda x: x**0,
    "power of a half": lambda x: x**0.5,
    "power of -2": lambda x: x**-2,
    "0 to a power": lambda x: 0.0**x,
    "remainder": lambda x: torch.remainder(x, 0.75),
    "nan to num": torch.nan_to_num,
    "logit": lambda x: torch.logit(x, 1e-2),
    "sinc": torch.sinc,
    "norm": torch.norm,
    "norm of 0": lambda x: x.norm(p=0, dim=1),
    "largest norm": lambda x: x.norm(p=INF, dim=1),
    "renorm": lambda x: torch.renorm(x, 2, 0, 1.0),
    "std of one": lambda x: x[:, :1].std(1, unbiased=False),
}.items():
    add("elements", name, function, MATRIX, kinds=ANY)
for name in ("maximum", "minimum", "fmax", "fmin", "atan2", "logaddexp", "xlogy", "copysign", "fmod", "div", "pow"):
    add("elements", name, getattr(torch, name), MATRIX, MATRIX)

# ---- ties in reductions ----

for name, function in {
    "max": torch.max,
    "max along": lambda x: x.max(1),
    "min along": lambda x: x.min(0),
    "amax": lambda x: x.amax(1),
    "amin of all": lambda x: x.amin((0, 1)),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "median": torch.median,
    "mode": lambda x: x.mode(1),
    "kthvalue": lambda x: x.kthvalue(2, 1),
    "sort": lambda x: torch.sort(x, dim=1, stable=True, descending=True),
    "topk": lambda x: x.topk(2, 1),
    "cummax": lambda x: x.cummax(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "prod": lambda x: x.prod(1),
    "cumprod": lambda x: x.cumprod(1),
    "quantile": lambda x: x.quantile(0.3, dim=1),
    "of nothing": lambda x: x[:0].sum() + x[:0].mean() * 0 + x[:0].prod(),
}.items():
    add("ties", name, function, MATRIX, kinds=FINITE)
for how, itself in itertools.product(("sum", "prod", "mean", "amax", "amin"), (True, False)):
    add(
        "ties",
        f"scatter_reduce {how} {itself}",
        lambda x, y, i, how=how, itself=itself: x.scatter_reduce(0, i, y, how, include_self=itself),
        MATRIX,
        (2, 4),
        given=[torch.tensor([[0, 0, 2, 1], [1, 1, 1, 1]])],
    )

# ---- losses ----

AIMS = ties(MATRIX, 9)
SIGNS = torch.tensor([1, -1, 1])
WEIGHTS = torch.tensor([0.0, 1.0, 2.0, 3.0])
TARGETS = {"plain": [0, 1, 2, 3, 1], "ignored": [0, -100, 2, -100, 1], "all ignored": [-100] * 5}
LABELS = {
    "some": [[3, -1, 0, 1], [0, 1, 2, 3], [-1, 0, 1, 2], [1, 1, -1, 0], [2, 0, 3, 1]],
    "none": [[-1, 2, 1, 0]] * 5,
    "one": [[0, 0, 0, 0]] * 5,
}
for reduction in REDUCTIONS:
    how: dict[str, Any] = {"reduction": reduction}
    for name, function in {
        "mse": F.mse_loss,
        "mse weighted": lambda x, y, **how: F.mse_loss(x, y, weight=y.abs(), **how),
        "l1": F.l1_loss,
        "huber": lambda x, y, **how: F.huber_loss(x, y, delta=0.25, **how),
        "smooth l1": lambda x, y, **how: F.smooth_l1_loss(x, y, beta=0.25, **how),
        "smooth l1 of beta 0": lambda x, y, **how: F.smooth_l1_loss(x, y, beta=0.0, **how),
        "soft margin": lambda x, y, **how: F.soft_margin_loss(x, y.sign(), **how),
        "kl": lambda x, y, **how: F.kl_div(x, y.clamp(min=0), **how),
        "kl of logs": lambda x, y, **how: F.kl_div(x, y, log_target=True, **how),
        "poisson": lambda x, y, **how: F.poisson_nll_loss(x, y.abs(), full=True, **how),
        "bce": lambda x, y, **how: F.binary_cross_entropy(x.nan_to_num().clamp(0, 1), y.clamp(0, 1), **how),
        "bce of logits": lambda x, y, **how: F.binary_cross_entropy_with_logits(
            x, y, weight=y.abs(), pos_weight=WEIGHTS.to(x.dtype), **how
        ),
        "multilabel soft margin": lambda x, y, **how: F.multilabel_soft_margin_loss(x, (y > 0).to(x.dtype), **how),
        "hinge": lambda x, y, **how: F.hinge_embedding_loss(x, y.sign(), margin=0.5, **how),
        "ranking": lambda x, y, **how: F.margin_ranking_loss(x, x.flip(0), y.sign(), margin=0.5, **how),
        "cosine": lambda x, y, **how: F.cosine_embedding_loss(x, y, SIGNS, margin=0.25, **how),
        "triplet": lambda x, y, **how: F.triplet_margin_loss(x, y, x.flip(0), swap=True, p=1, margin=0.5, **how),
        "cross entropy of probabilities": lambda x, y, **how: F.cross_entropy(
            x, y.softmax(1), weight=WEIGHTS.to(x.dtype), label_smoothing=0.2, **how
        ),
    }.items():
        add("losses", f"{name} {reduction}", functools.partial(function, **how), MATRIX, given=[AIMS], kinds=SOME)
    for name in ("l1_loss", "soft_margin_loss", "binary_cross_entropy_with_logits"):
        nobody = functools.partial(getattr(F, name), **how)
        add("losses", f"{name} {reduction} of nothing", nobody, (0, 4), given=[torch.zeros(0, 4)], kinds=[usual])
    for (name, classes), weigh, smoothing in itertools.product(TARGETS.items(), (False, True), (0.0, 0.3)):

        def entropy(x: Tensor, t: Tensor, weigh: bool = weigh, **how: Any) -> Tensor:
            return F.cross_entropy(x, t, WEIGHTS.to(x.dtype) if weigh else None, **how)

        entropy = functools.partial(entropy, label_smoothing=smoothing, **how)
        name = f"cross entropy, {name}, {weigh}, {smoothing}, {reduction}"
        images = torch.tensor(classes).reshape(1, 5, 1).expand(2, 5, 3)
        add("classes", name, entropy, (5, 4), given=[torch.tensor(classes)], kinds=(usual, ties))
        add("classes", f"{name} of images", entropy, (2, 4, 5, 3), given=[images], kinds=[usual])
    for ignored in (255, -1, 0):
        skip = functools.partial(F.cross_entropy, ignore_index=ignored, **how)
        for classes in (torch.tensor([0, ignored, 2, ignored, 1]), torch.tensor([ignored] * 5)):
            add("classes", f"ignored {ignored} {reduction}", skip, (5, 4), given=[classes], kinds=(usual, extremes))
    for name, labels in LABELS.items():
        several = functools.partial(F.multilabel_margin_loss, **how)
        add("classes", f"labels {name} {reduction}", several, (5, 4), given=[torch.tensor(labels)], kinds=SOME)
    for p, margin in itertools.product((1, 2), (1.0, 0.5, 0.0)):
        one = functools.partial(F.multi_margin_loss, p=p, margin=margin, **how)
        add(
            "classes",
            f"margin {p} {margin} {reduction}",
            one,
            (5, 4),
            given=[torch.tensor([0, 1, 2, 3, 0])],
            kinds=SOME,
        )

# ---- pooling ----

for name, function in {
    "max": functools.partial(F.max_pool2d, kernel_size=2, stride=2, dilation=2, return_indices=True),
    "max, ceiled": functools.partial(F.max_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True),
    "average": functools.partial(F.avg_pool2d, kernel_size=3, stride=2, padding=1, ceil_mode=True),
    "average of what is there": functools.partial(F.avg_pool2d, kernel_size=3, padding=1, count_include_pad=False),
    "average by a divisor": functools.partial(F.avg_pool2d, kernel_size=2, divisor_override=5),
    "power average": functools.partial(F.lp_pool2d, norm_type=3.0, kernel_size=2, ceil_mode=True),
    "adaptive average": functools.partial(F.adaptive_avg_pool2d, output_size=(2, 4)),
    "adaptive max": functools.partial(F.adaptive_max_pool2d, output_size=(2, 4), return_indices=True),
    "fractional max": functools.partial(F.fractional_max_pool2d, kernel_size=2, output_size=(2, 3)),
    "unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
}.items():
    add("pooling", name, function, IMAGES, kinds=(*FINITE, undefined))
# ---- norms, embeddings, attention ----

add("norms", "batch norm", lambda x, w: F.batch_norm(x, None, None, w, training=True), IMAGES, (3,), kinds=ANY)
add("norms", "layer norm", lambda x, w, b: F.layer_norm(x, (5, 6), w, b), IMAGES, (5, 6), (5, 6), kinds=ANY)
add("norms", "group norm", functools.partial(F.group_norm, num_groups=3), IMAGES, kinds=ANY)
add("norms", "instance norm", F.instance_norm, IMAGES, kinds=ANY)
add("norms", "rms norm", lambda x: F.rms_norm(x, (4,)), MATRIX, kinds=ANY)
add("norms", "local response", functools.partial(F.local_response_norm, size=3), IMAGES, kinds=ANY)
add("norms", "layer norm of nothing", lambda x, w: F.layer_norm(x, (6,), w), (0, 6), (6,), kinds=[usual])
ROWS, BAGS = torch.tensor([0, 2, 2, 1, 0, 4]), torch.tensor([0, 2, 2, 5])
for options in ({}, {"padding_idx": 2}, {"padding_idx": -1}, {"scale_grad_by_freq": True}):
    look = lambda w, i, options=options: F.embedding(i, w, **options)  # noqa: E731
    add("embeddings", f"embedding {options}", look, (5, 4), given=[ROWS])
    for mode in ("sum", "mean", "max"):
        if mode != "max" or "scale_grad_by_freq" not in options:
            bag = lambda w, i, o, mode=mode, options=options: F.embedding_bag(i, w, o, mode=mode, **options)  # noqa: E731
            add("embeddings", f"bags {mode} {options}", bag, (5, 4), given=[ROWS, BAGS], kinds=(usual, ties))
add(
    "embeddings",
    "weighed bags",
    lambda w, each, i, o: F.embedding_bag(i, w, o, mode="sum", per_sample_weights=each, padding_idx=2),
    *((5, 4), (6,)),
    given=[ROWS, BAGS],
)
HIDDEN = torch.tensor([[True, False, True, True, False, True]] * 4 + [[False] * 6])  # the last row sees nothing
QUERIES = ((2, 2, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8))
add("attention", "causal", functools.partial(F.scaled_dot_product_attention, is_causal=True), *QUERIES, kinds=ANY)
add("attention", "masked", F.scaled_dot_product_attention, *QUERIES, given=[HIDDEN])


@pytest.mark.slow
@pytest.mark.parametrize("group", CASES)
def test_a_captured_step_is_eager_at_the_edges(group: str) -> None:
    wrong = [line for case in CASES[group] for line in case.differences()]
    assert not wrong, "\n".join(wrong)
