"""Every operator of a training graph as ONNX: onnxruntime's results are those of ATen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import needs_onnx  # noqa: F401
import numpy
import onnxruntime
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fxpipe.onnx.convert import convert

aten = torch.ops.aten
TOLERANCE = 1e-5


def seeded(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + 17 * len(shape)), dtype=dtype)


def whole(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def gradients(f: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    """The function's value and its gradients, for inputs that are floating."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            leaves = [a.detach().requires_grad_() if a.is_floating_point() else a for a in args]
            out = f(*leaves)
            wanted = [a for a in leaves if a.requires_grad]
            # Weights of the sum that differ from entry to entry: a plain sum hides what is in the wrong place.
            weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin() + 0.5
            return (out.detach(), *torch.autograd.grad((out * weights).sum(), wanted))

    return run


def check(cases: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]]) -> None:
    """All cases as one graph, converted and run."""
    inputs = {f"{case}: {i}": x for case, (_, xs) in cases.items() for i, x in enumerate(xs)}

    def run(*args: Tensor) -> dict[str, Tensor]:
        left = list(args)
        found = {}
        for name, (f, xs) in cases.items():
            result = f(*[left.pop(0) for _ in xs])
            parts = [result] if isinstance(result, Tensor) else [r for r in result if isinstance(r, Tensor)]
            found |= {f"{name} -> {i}": part for i, part in enumerate(parts)}
        return found

    expected = run(*inputs.values())
    trace = make_fx(lambda *args: tuple(run(*args).values()), tracing_mode="fake", _allow_non_fake_inputs=True)
    module = trace(*inputs.values())
    module.graph.eliminate_dead_code()
    model = convert(module, list(inputs.values()), list(inputs), list(expected))
    assert [i.name for i in model.graph.input] == list(inputs)
    assert [o.name for o in model.graph.output] == list(expected)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {n: numpy.ascontiguousarray(x.numpy()) for n, x in inputs.items()}
    found = session.run(list(expected), feeds)
    wrong = [p for (n, e), f in zip(expected.items(), found, strict=True) for p in difference(n, numpy.array(f), e)]
    assert not wrong, "\n".join(wrong)


def difference(name: str, found: numpy.ndarray, expected: Tensor) -> list[str]:
    value = torch.from_numpy(found)
    if value.dtype != expected.dtype or value.shape != expected.shape:
        return [f"{name}: {value.dtype} {tuple(value.shape)}, not {expected.dtype} {tuple(expected.shape)}"]
    finite = expected.double().isfinite()
    if not torch.equal(value.double().isfinite(), finite):
        return [f"{name}: infinite elsewhere"]
    error, size = (value.double() - expected.double())[finite].norm(), expected.double()[finite].norm()
    # In half precision ATen's own kernels round sums to three digits.
    tolerance = 5e-3 if "half" in name else TOLERANCE
    return [] if error <= tolerance * size + 1e-6 * tolerance else [f"{name}: {error / size}"]


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {}


def case(name: str, f: Callable[..., Any], *inputs: Tensor) -> None:
    assert name not in CASES, name
    CASES[name] = (f, inputs)


def grad_case(name: str, f: Callable[..., Any], *inputs: Tensor, **options: Any) -> None:
    case(name, gradients(partial(f, **options)), *inputs)


# ---- attention ----

Q, K, V = (seeded(2, 3, 6, 8, seed=i) for i in range(3))
MASK = seeded(6, 6, seed=4)
flash = aten._scaled_dot_product_flash_attention_for_cpu.default
flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *mask: Tensor, causal: bool = False, scale: Any = None
) -> Any:
    m = mask[0] if mask else None
    out, lse = flash(q, k, v, 0.0, causal, attn_mask=m, scale=scale)
    return out, lse, *flash_backward(g, q, k, v, out, lse, 0.0, causal, attn_mask=m, scale=scale)


G = seeded(2, 3, 6, 8, seed=9)
case("attention", attention, Q, K, V, G)
case("attention causal", lambda *a: attention(*a, causal=True), Q, K, V, G)
case("attention scale", lambda *a: attention(*a, causal=True, scale=0.3), Q, K, V, G)
case("attention mask", attention, Q, K, V, G, MASK)
case("attention longer keys", attention, Q, seeded(2, 3, 9, 8, seed=5), seeded(2, 3, 9, 8, seed=6), G)
SHARED = (seeded(2, 4, 6, 8), seeded(2, 2, 6, 8, seed=1), seeded(2, 2, 6, 8, seed=2), seeded(2, 4, 6, 8, seed=9))
case("attention shared heads", attention, *SHARED)
case("attention one head of keys", attention, SHARED[0], K[:, :1].clone(), V[:, :1].clone(), SHARED[3])
case("attention shared heads, mask", lambda *a: attention(*a, causal=True), *SHARED, MASK)
case(
    "attention fewer keys, causal",
    lambda *a: attention(*a, causal=True),
    *(Q, seeded(2, 3, 4, 8, seed=5), seeded(2, 3, 4, 8, seed=6), G),
)
KEEP = torch.ones(2, 1, 6, 6, dtype=torch.bool)
KEEP[0, :, 1] = KEEP[1, :, 2, :3] = KEEP[1, :, 4, 5] = False
NEVER = torch.full((6, 6), float("-inf"))
for name, keep in [("an empty row", KEEP), ("an empty sample", KEEP & torch.tensor([False, True]).view(2, 1, 1, 1))]:
    for causal in (False, True):
        case(
            f"attention {name}, causal {causal}",
            lambda *a, c=causal: attention(*a, causal=c),
            *(Q, K, V, G, torch.where(keep, MASK, float("-inf"))),
        )
    grad_case(f"attention {name}, bools", lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), Q, K, V, keep)
case("attention empty rows only", attention, Q, K, V, G, NEVER)
case("attention empty rows, shared heads", attention, *SHARED, NEVER.where(torch.arange(6)[:, None] == 3, MASK))
grad_case("attention, math", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=MASK), Q, K, V)

# ---- convolutions ----

for name, x, w, options in [
    ("1d", seeded(2, 4, 9), seeded(6, 4, 3), {"padding": 1}),
    ("2d", seeded(2, 4, 7, 6), seeded(6, 4, 3, 3), {"padding": 1}),
    ("2d stride", seeded(2, 4, 8, 7), seeded(6, 4, 3, 3), {"stride": 2, "padding": 1}),
    ("2d stride uneven", seeded(2, 4, 8, 9), seeded(6, 4, 3, 2), {"stride": (3, 2), "padding": (1, 0)}),
    ("2d dilation", seeded(2, 4, 9, 8), seeded(6, 4, 3, 3), {"dilation": 2, "padding": 1}),
    ("2d stride dilation", seeded(2, 4, 9, 8), seeded(6, 4, 3, 3), {"dilation": 2, "padding": 1, "stride": 2}),
    ("2d groups", seeded(2, 4, 7, 6), seeded(6, 2, 3, 3), {"groups": 2, "padding": 1}),
    ("2d depthwise", seeded(2, 4, 7, 6), seeded(4, 1, 3, 3), {"groups": 4, "padding": 1, "stride": 2}),
    ("2d 1x1", seeded(2, 4, 7, 6), seeded(6, 4, 1, 1), {}),
    ("2d 1x1 stride", seeded(2, 4, 7, 6), seeded(6, 4, 1, 1), {"stride": 2}),
    ("2d patches", seeded(2, 3, 8, 8), seeded(6, 3, 4, 4), {"stride": 4}),
    ("2d large padding", seeded(2, 3, 5, 5), seeded(6, 3, 3, 3), {"padding": 3}),
    ("3d", seeded(2, 3, 5, 6, 4), seeded(4, 3, 3, 2, 3), {"padding": 1, "stride": (1, 2, 1)}),
]:
    convolve = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}[x.ndim]
    grad_case(f"convolution {name}", convolve, x, w, seeded(w.shape[0]), **options)
for name, x, w, options in [
    ("1d", seeded(2, 4, 5), seeded(4, 3, 3), {"stride": 2, "padding": 1}),
    ("2d", seeded(2, 4, 5, 4), seeded(4, 3, 2, 2), {"stride": 2}),
    ("2d output padding", seeded(2, 4, 5, 4), seeded(4, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    ("2d groups", seeded(2, 4, 5, 4), seeded(4, 3, 3, 3), {"stride": 2, "groups": 2}),
    ("2d dilation", seeded(2, 4, 5, 4), seeded(4, 3, 3, 3), {"dilation": 2, "padding": 1}),
    ("1d output padding of a stride", seeded(2, 4, 5), seeded(4, 3, 3), {"dilation": 2, "output_padding": 1}),
    (
        "2d output padding beyond the stride",
        seeded(2, 4, 5, 4),
        seeded(4, 3, 3, 3),
        {"stride": (2, 1), "dilation": 3, "padding": (1, 2), "output_padding": (2, 1), "groups": 2},
    ),
    ("3d", seeded(2, 3, 3, 4, 3), seeded(3, 2, 2, 2, 2), {"stride": 2}),
]:
    convolve = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[x.ndim]
    channels = w.shape[1] * options.get("groups", 1)
    grad_case(f"transposed convolution {name}", convolve, x, w, seeded(channels), **options)
grad_case("convolution without bias", lambda x, w: F.conv2d(x, w, padding=1), seeded(2, 3, 6, 6), seeded(4, 3, 3, 3))

# ---- pooling ----

IMAGE = seeded(2, 3, 8, 9)
VOLUME = seeded(2, 3, 6, 5, 4)
for name, x, options in [
    ("2d", IMAGE, {"kernel_size": 2}),
    ("2d overlapping", IMAGE, {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("2d ceil", IMAGE, {"kernel_size": 2, "ceil_mode": True}),
    ("2d dilation", IMAGE, {"kernel_size": 2, "dilation": 2}),
    ("2d dilation of windows side by side", seeded(2, 3, 9, 9), {"kernel_size": 2, "stride": 2, "dilation": 2}),
    ("2d uneven", IMAGE, {"kernel_size": (2, 3), "stride": (1, 2)}),
    ("1d", seeded(2, 3, 9), {"kernel_size": 3, "stride": 2}),
    ("3d", VOLUME, {"kernel_size": 2}),
    ("3d overlapping", VOLUME, {"kernel_size": 3, "stride": 2, "padding": 1}),
]:
    pool = {3: F.max_pool1d, 4: F.max_pool2d, 5: F.max_pool3d}[x.ndim]
    grad_case(f"max pool {name}", pool, x, **options)
case("max pool indices", lambda x: aten.max_pool2d_with_indices.default(x, [3, 3], [2, 2], [1, 1]), IMAGE)
case("max pool indices 3d", lambda x: aten.max_pool3d_with_indices.default(x, [2, 2, 2], [2, 2, 2]), VOLUME)
for name, x, options in [
    ("2d", IMAGE, {"kernel_size": 2}),
    ("2d padding", IMAGE, {"kernel_size": 3, "stride": 2, "padding": 1}),
    ("2d padding left out", IMAGE, {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
    ("2d ceil", IMAGE, {"kernel_size": 2, "ceil_mode": True}),
    ("2d divisor", IMAGE, {"kernel_size": 2, "divisor_override": 3}),
    ("1d", seeded(2, 3, 9), {"kernel_size": 3, "stride": 2}),
    ("3d", VOLUME, {"kernel_size": 2}),
]:
    pool = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[x.ndim]
    grad_case(f"average pool {name}", pool, x, **options)
grad_case("adaptive average pool to one", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE)
grad_case("adaptive average pool even", lambda x: F.adaptive_avg_pool2d(x, (4, 3)), IMAGE)
grad_case("adaptive average pool uneven", lambda x: F.adaptive_avg_pool2d(x, (3, 7)), IMAGE)
grad_case("adaptive average pool larger", lambda x: F.adaptive_avg_pool2d(x, (7, 7)), seeded(2, 3, 4, 4))
grad_case("adaptive average pool 1d", lambda x: F.adaptive_avg_pool1d(x, 4), seeded(2, 3, 9))
grad_case("adaptive average pool 3d", lambda x: F.adaptive_avg_pool3d(x, (3, 2, 2)), VOLUME)
grad_case("adaptive max pool even", lambda x: F.adaptive_max_pool2d(x, (4, 3)), IMAGE)
grad_case("adaptive max pool uneven", lambda x: F.adaptive_max_pool2d(x, (3, 7)), IMAGE)

# ---- norms ----

for name, shape in [("2d", (6, 4)), ("4d", (3, 4, 5, 6)), ("3d", (3, 4, 5))]:
    grad_case(
        f"batch norm {name}",
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        seeded(*shape),
        seeded(4),
        seeded(4, seed=1),
    )


evaluated = aten._native_batch_norm_legit_no_training.default
case(
    "batch norm in eval mode",
    lambda x, m, v: evaluated(x, m, v, m, v.exp(), 0.1, 1e-5),
    IMAGE,
    seeded(3),
    seeded(3, seed=1),
)
batch_norm = aten._native_batch_norm_legit_functional.default


def batch_norm_backward(g: Tensor, x: Tensor, w: Tensor, m: Tensor, v: Tensor, train: bool) -> Any:
    _, mean, rstd, *_ = batch_norm(x, w, w, m, v, train, 0.1, 1e-5)
    return aten.native_batch_norm_backward.default(g, x, w, m, v, mean, rstd, train, 1e-5, [True, True, True])


NORMED = (seeded(3, 4, 5, 6), seeded(4), seeded(4, seed=1), seeded(4, seed=2), seeded(4, seed=3).abs())
case("batch norm running", lambda *a: batch_norm(*a, True, 0.1, 1e-5), *NORMED)
updated = aten._batch_norm_with_update_functional.default
case("batch norm updating", lambda *a: [r for i, r in enumerate(updated(*a, 0.1, 1e-5)) if i != 3], *NORMED)
case("batch norm alone", lambda *a: aten._native_batch_norm_legit.no_stats(*a, True, 0.1, 1e-5), *NORMED[:3])
case("batch norm evaluating", lambda *a: batch_norm(*a, False, 0.1, 1e-5), *NORMED)
NORM_GRAD = (seeded(3, 4, 5, 6, seed=4), *NORMED[:2], *NORMED[3:])
case("batch norm backward", lambda *a: batch_norm_backward(*a, True), *NORM_GRAD)
case("batch norm backward evaluating", lambda *a: batch_norm_backward(*a, False), *NORM_GRAD)
AFFINE = (seeded(3, 4, 5), seeded(5), seeded(5))
case("layer norm saved", lambda x, w, b: aten.native_layer_norm.default(x, [5], w, b, 1e-5), *AFFINE)
case("layer norm plain", lambda x: aten.native_layer_norm.default(x, [4, 5], None, None, 1e-5), seeded(3, 4, 5))
grad_case("layer norm", lambda x, w, b: F.layer_norm(x, (5,), w, b), seeded(3, 4, 5), seeded(5), seeded(5, seed=1))
grad_case("layer norm no bias", lambda x, w: F.layer_norm(x, (5,), w), seeded(3, 4, 5), seeded(5))
grad_case("layer norm two axes", lambda x, w: F.layer_norm(x, (4, 5), w), seeded(3, 4, 5), seeded(4, 5))
grad_case("layer norm no weight", lambda x: F.layer_norm(x, (5,)), seeded(3, 4, 5))
grad_case("layer norm one axis", lambda x, w, b: F.layer_norm(x, (7,), w, b), *(seeded(7, seed=i) for i in range(3)))
grad_case("layer norm all axes", lambda x, w: F.layer_norm(x, (4, 5), w), seeded(4, 5), seeded(4, 5, seed=1))
grad_case("rms norm", lambda x, w: F.rms_norm(x, (5,), w), seeded(3, 4, 5), seeded(5))
case("group norm saved", lambda x, w: aten.native_group_norm.default(x, w, w, 3, 4, 30, 2, 1e-5), NORMED[0], NORMED[1])
grad_case("group norm", lambda x, w, b: F.group_norm(x, 2, w, b), *NORMED[:3])
grad_case("group norm no weight", lambda x: F.group_norm(x, 2), NORMED[0])

HALF, HALF_GRAD = NORMED[0].half(), seeded(3, 4, 5, 6, seed=4).half()
for kind in (torch.float32, torch.float16):  # of weights and statistics
    w, b, m, v = (t.to(kind) for t in NORMED[1:])
    case(
        f"half layer norm backward, {kind}",
        lambda g, x, w, m, r: aten.native_layer_norm_backward.default(g, x, [6], m, r, w, w, [True] * 3),
        *(HALF_GRAD, HALF, seeded(6).to(kind), seeded(3, 4, 5, 1).to(kind), seeded(3, 4, 5, 1).abs().to(kind)),
    )
    case(f"half group norm, {kind}", lambda *a: aten.native_group_norm.default(*a, 3, 4, 30, 2, 1e-5), HALF, w, b)
    case(
        f"half group norm backward, {kind}",
        lambda g, x, m, r, w: aten.native_group_norm_backward.default(g, x, m, r, w, 3, 4, 30, 2, [True] * 3),
        *(HALF_GRAD, HALF, seeded(3, 2).to(kind), seeded(3, 2).abs().to(kind), w),
    )
    case(f"half batch norm, {kind}", lambda *a: batch_norm(*a, True, 0.1, 1e-5), HALF, w, b, m, v)
    for train in (True, False):
        case(
            f"half batch norm backward, {kind}, train {train}",
            lambda g, x, w, m, v, r, t=train: aten.native_batch_norm_backward.default(
                g, x, w, m, v, m, r, t, 1e-5, [True] * 3
            ),
            *(HALF_GRAD, HALF, w, m, v, v + 1),
        )
grad_case("instance norm", lambda x, w, b: F.instance_norm(x, weight=w, bias=b), *NORMED[:3])

# ---- losses ----

LOGITS, LABELS = seeded(6, 5), whole(5, 6)
IGNORED = torch.tensor([0, -100, 3, 2, -100, 4])
WEIGHT = seeded(5).abs()
OTHERS, LIKELY = seeded(6, 5, seed=3), seeded(6, 5, seed=1).sigmoid()
PICTURES = (seeded(2, 5, 3, 4), whole(5, 2, 3, 4))
for reduction in ("mean", "sum", "none"):
    how = {"reduction": reduction}
    grad_case(f"cross entropy {reduction}", F.cross_entropy, LOGITS, LABELS, **how)
    grad_case(
        f"cross entropy weights {reduction}",
        lambda x, t, w, **how: F.cross_entropy(x, t, w.detach(), **how) + 0 * w.sum(),
        *(LOGITS, IGNORED, WEIGHT),
        **how,
    )
    grad_case(f"cross entropy 2d {reduction}", F.cross_entropy, *PICTURES, ignore_index=2, **how)
    for loss in (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss):
        grad_case(f"{loss.__name__} {reduction}", loss, LOGITS, OTHERS, **how)
    grad_case(f"binary cross entropy {reduction}", F.binary_cross_entropy, seeded(6, 5).sigmoid(), LIKELY, **how)
    of_logits = F.binary_cross_entropy_with_logits
    grad_case(f"binary cross entropy of logits {reduction}", of_logits, LOGITS, LIKELY, **how)
    grad_case(f"kl_div {reduction}", F.kl_div, LOGITS, seeded(6, 5).sigmoid(), **how)
NEAR, SEVERAL = (
    LOGITS * 0.3,
    torch.tensor([[3, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-1, 0, 1, 2, 3], [1, 1, -1, 0, 0]] * 2)[:6],
)
for reduction in ("mean", "sum", "none"):
    how = {"reduction": reduction}
    grad_case(f"margin {reduction}", F.multi_margin_loss, NEAR, LABELS, margin=0.3, **how)
    grad_case(f"margin squared {reduction}", F.multi_margin_loss, NEAR, LABELS, p=2, **how)
    grad_case(
        f"margin weights {reduction}",
        lambda x, t, w, **how: F.multi_margin_loss(x, t, weight=w.detach(), **how) + 0 * w.sum(),
        *(NEAR, LABELS, WEIGHT),
        **how,
    )
    grad_case(f"margins of labels {reduction}", F.multilabel_margin_loss, NEAR, SEVERAL, **how)
    grad_case(f"margins of one sample's labels {reduction}", F.multilabel_margin_loss, NEAR[0], SEVERAL[0], **how)
grad_case("margin exactly", F.multi_margin_loss, torch.zeros(6, 5), LABELS, margin=0)
case("which are labels", lambda x, t: aten.multilabel_margin_loss_forward.default(x, t, 1), NEAR, SEVERAL)
nll = aten.nll_loss_forward.default
case("nll total weight", lambda x, t: nll(x, t, None, 1, -100), LOGITS, IGNORED)
case("nll total weight of weights", lambda x, t, w: nll(x, t, w, 1, -100), LOGITS, IGNORED, WEIGHT)
case("nll sum total weight", lambda x, t, w: nll(x, t, w, 2, -100), LOGITS, IGNORED, WEIGHT)
case("nll none total weight", lambda x, t, w: nll(x, t, w, 0, -100), LOGITS, IGNORED, WEIGHT)
case("nll 2d total weight", lambda x, t: aten.nll_loss2d_forward.default(x, t, None, 1, -100), *PICTURES)
grad_case("label smoothing", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), LOGITS, LABELS)
grad_case("soft labels", lambda x: F.cross_entropy(x, LOGITS.softmax(-1)), seeded(6, 5, seed=3))
grad_case("cosine embedding", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6)), LOGITS, seeded(6, 5, seed=3))

# ---- activations ----

X = seeded(4, 7) * 3
for f in (
    F.gelu, F.silu, F.mish, F.softplus, F.hardtanh, F.hardswish, F.hardsigmoid, F.elu, F.selu, F.celu, F.leaky_relu,
    F.relu, F.relu6, F.logsigmoid, F.softsign, F.tanhshrink, F.softshrink, F.hardshrink, torch.sigmoid, torch.tanh,
    torch.exp, torch.sin, torch.cos, torch.erf, torch.abs, torch.square, torch.expm1, torch.atan, torch.sinh,
):  # fmt: skip
    grad_case(f"activation {f.__name__}", f, X)
grad_case("gelu tanh", lambda x: F.gelu(x, approximate="tanh"), X)
grad_case("elu alpha", lambda x: F.elu(x, 0.7), X)
grad_case("softplus beta", lambda x: F.softplus(x, 2.0, 3.0), X)
grad_case("threshold", lambda x: F.threshold(x, 0.3, -1.0), X)
grad_case("prelu", F.prelu, seeded(3, 4, 5), seeded(4))
grad_case("glu", lambda x: F.glu(x, 0), X)
grad_case("softmax", lambda x: F.softmax(x, -1), X)
grad_case("softmax first axis", lambda x: F.softmax(x, 0), X)
grad_case("log softmax", lambda x: F.log_softmax(x, -1), X)
grad_case("log softmax middle axis", lambda x: F.log_softmax(x, 1), seeded(3, 4, 5))
case("dropout backward", lambda g, m: aten.native_dropout_backward.default(g, m, 1.25), X, X > 0)
for f in (torch.log, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.log1p, torch.log2):
    grad_case(f"positive {f.__name__}", f, X.abs() + 0.1)

# ---- arithmetic and reductions ----

A, B = seeded(4, 5), seeded(5, 3)
case("addmm", lambda c, a, b: aten.addmm.default(c, a, b, beta=0.5, alpha=2.0), seeded(3), A, B)
MATRICES = (seeded(2, 4, 3), seeded(2, 4, 5), seeded(2, 5, 3))
case("baddbmm", lambda c, a, b: aten.baddbmm.default(c, a, b, beta=0.5, alpha=2.0), *MATRICES)
case("baddbmm beta 0", lambda c, a, b: aten.baddbmm.default(c, a, b, beta=0, alpha=0.3), *MATRICES)
case(
    "addbmm and friends",
    lambda a, b: (a @ b, a.t(), aten.mv.default(a, b[:, 0]), aten.dot.default(a[0], b[:, 1])),
    *(A, B),
)
case(
    "addcmul",
    lambda a, b, c: (aten.addcmul.default(a, b, c, value=0.5), aten.addcdiv.default(a, b, c, value=2.0)),
    *(A, A, A),
)
case(
    "add alpha",
    lambda a, b: (aten.add.Tensor(a, b, alpha=0.5), aten.sub.Tensor(a, b, alpha=2), aten.rsub.Scalar(a, 3, 2)),
    *(A, A),
)
case("whole numbers", lambda a: (a + 1, a // 2, a % 3, -a, a * a, a.float() / 2, a - 2.5), whole(9, 4, 5))
case(
    "remainders",
    lambda a: (a.remainder(0.7), a.fmod(0.7), a.floor_divide(0.7), a.div(0.3, rounding_mode="trunc")),
    A,
)
case(
    "comparisons",
    lambda a, b: (a > b, a <= 0, a == b, a.ne(0.5), (a > 0) & (b > 0), (a > 0) | (b > 0), ~(a > b), a.logical_not()),
    A,
    seeded(4, 5, seed=1),
)
case(
    "bool arithmetic",
    lambda a, m: (a * m, m.sum(), m.float(), m.long().sum(0), a.masked_fill(m, -1.0), a.sum() * m),
    A,
    A > 0,
)
case("sums", lambda a: (a.sum(), a.sum(1), a.sum((0, 2), keepdim=True), a.mean(-1), a.mean()), seeded(3, 4, 5))
case(
    "amax",
    lambda a: (a.amax(1), a.amin((0, 1)), a.max(), a.min(), a.argmax(-1), a.argmin(0, keepdim=True), a.argmax()),
    seeded(3, 4, 5),
)
case("max dim", lambda a: (*a.max(1), *a.min(-1)), seeded(3, 4, 5))
case("any all", lambda a: ((a > 1).any(), (a > -9).all(), (a > 0).any(1), (a > 0).all(1)), seeded(3, 4, 5))
grad_case("var", lambda a: a.var((1, 2)), seeded(3, 4, 5))
grad_case("std", lambda a: a.std(-1, correction=0), seeded(3, 4, 5))
case(
    "var_mean",
    lambda a: (*torch.var_mean(a, (0, 2), correction=0), *torch.var_mean(a, -1, keepdim=True)),
    seeded(3, 4, 5),
)
grad_case("norm", lambda a: a.norm(), A)
grad_case("norm of rows", lambda a: torch.linalg.vector_norm(a, 2, dim=-1), A)
grad_case("norm 1", lambda a: torch.linalg.vector_norm(a, 1, dim=0), A)
grad_case("norm 3", lambda a: torch.linalg.vector_norm(a, 3, dim=0), A)
grad_case("normalize", lambda a: F.normalize(a, dim=1), A)
grad_case("prod", lambda a: a.prod(1), A)
grad_case("max gradient", lambda a: a.max(1).values, A)
grad_case("amax gradient", lambda a: a.amax(1), A)
grad_case("logsumexp", lambda a: a.logsumexp(1), A)
grad_case("cumsum", lambda a: a.cumsum(1), A)
case("cumsum of whole numbers", lambda a: (a.cumsum(0), (a > 2).cumsum(1)), whole(5, 4, 5))
grad_case("cumprod", lambda a: a.cumprod(1), A)
grad_case("pow", lambda a: a.abs() ** 1.7, A)
grad_case("pow 3", lambda a: a**3, A)
grad_case("pow of tensors", lambda a, b: a.abs() ** b, A, seeded(4, 5, seed=1))
grad_case("power of a number", lambda a: 2.0**a, A)
grad_case("clamp", lambda a: a.clamp(-0.5, 0.5), A)
grad_case("clamp min", lambda a: a.clamp_min(0.1), A)
grad_case("maximum", lambda a, b: torch.maximum(a, b) + torch.minimum(a, 2 * b), A, seeded(4, 5, seed=1))
grad_case("where", lambda a, b: torch.where(a > 0, a, b), A, seeded(4, 5, seed=1))
grad_case("masked fill", lambda a: a.masked_fill(A > 0, 2.0), A)
grad_case("lerp", lambda a, b: a.lerp(b, 0.3), A, seeded(4, 5, seed=1))
grad_case("einsum", lambda a, b: torch.einsum("bij,bjk->bki", a, b), seeded(2, 4, 5), seeded(2, 5, 3))
grad_case("cdist", lambda a, b: torch.cdist(a, b), A, seeded(6, 5))
grad_case("cosine similarity", lambda a, b: F.cosine_similarity(a, b), A, seeded(4, 5, seed=1))
grad_case("atan2", torch.atan2, A, seeded(4, 5, seed=1))
case("double", lambda a: (a @ a.t(), a.sum(), a.float()), seeded(3, 4, dtype=torch.float64))
case("half", lambda a: (a + a, a.float() * 2), seeded(3, 4).half())

# ---- indexing ----

TABLE = seeded(7, 4)
ROWS = whole(7, 3, 5)
grad_case("embedding", lambda w, i: F.embedding(i, w), TABLE, ROWS)
grad_case("embedding padding", lambda w, i: F.embedding(i, w, padding_idx=2), TABLE, ROWS)
grad_case("embedding frequency", lambda w, i: F.embedding(i, w, scale_grad_by_freq=True), TABLE, ROWS)
grad_case("embedding small", lambda w, i: F.embedding(i, w), TABLE, ROWS.int())
grad_case("index", lambda a, i: a[i], TABLE, whole(7, 6))
grad_case("index negative", lambda a, i: a[i - 7], TABLE, whole(7, 6))
grad_case("index two", lambda a, i, j: a[i, j], TABLE, whole(7, 6), whole(4, 6))
grad_case("index second axis", lambda a, i: a[:, i], TABLE, whole(4, 6))
grad_case("index apart", lambda a, i, j: a[i, :, j], seeded(4, 3, 5), whole(4, 6), whole(5, 6))
grad_case("index broadcast", lambda a, i, j: a[i[:, None], j], TABLE, whole(7, 6), whole(4, 3))
grad_case("index select", lambda a, i: a.index_select(1, i), TABLE, whole(4, 6))
grad_case("gather", lambda a, i: a.gather(1, i), TABLE, whole(4, 7, 3))
grad_case("gather fewer rows", lambda a, i: a.gather(1, i), TABLE, whole(4, 5, 3))
grad_case("take along", lambda a, i: a.take_along_dim(i, 1), TABLE, whole(4, 7, 3))
PLACES = torch.tensor([[0, 2, 1], [3, 1, 0], [2, 3, 1]])
grad_case("scatter", lambda a, s, i: a.scatter(1, i, s), TABLE, seeded(3, 3), PLACES)
case("scatter value", lambda a, i: aten.scatter.value(a, 1, i, 3.5), TABLE, PLACES)
grad_case("scatter add", lambda a, s, i: a.scatter_add(1, i, s), TABLE, seeded(5, 3), whole(4, 5, 3))
grad_case("scatter reduce sum", lambda a, s, i: a.scatter_reduce(1, i, s, "sum"), TABLE, seeded(5, 3), whole(4, 5, 3))
case("scatter reduce max", lambda a, s, i: a.scatter_reduce(1, i, s, "amax"), TABLE, seeded(5, 3), whole(4, 5, 3))
grad_case("index add", lambda a, s, i: a.index_add(0, i, s), TABLE, seeded(5, 4), whole(7, 5))
grad_case("index copy", lambda a, s: a.index_copy(0, torch.tensor([3, 1]), s), TABLE, seeded(2, 4))
grad_case("index put", lambda a, v: a.index_put((torch.tensor([3, 1]),), v), TABLE, seeded(2, 4))
case("index put adds", lambda a, i, v: a.index_put((i,), v, accumulate=True), TABLE, whole(7, 5), seeded(5, 4))
PAIRS = (whole(7, 5), whole(4, 5))
put, unsafe_put = aten.index_put.default, aten._unsafe_index_put.default
case("index put two", lambda a, i, j, v: a.index_put((i, j), v, accumulate=True), TABLE, *PAIRS, seeded(5))
case("index put second", lambda a, i, v: put(a, [None, i], v, True), TABLE, whole(4, 5), seeded(7, 5))
case("index put broadcast", lambda a, i, v: put(a, [i], v, True), TABLE, whole(7, 5), seeded(1))
case("unsafe index put", lambda a, i, v: unsafe_put(a, [i], v, True), TABLE, whole(7, 5), seeded(5, 4))
case("index bool put", lambda a, m: aten.index_put.default(a, [m], torch.tensor(2.0)), TABLE, TABLE > 0)
grad_case("slice", lambda a: a[1:6:2, 1:], TABLE)
grad_case("select", lambda a: a[2] + a[-1], TABLE)
case("slice backward", lambda g: aten.slice_backward.default(g, [7, 4], 0, 1, 6, 2), seeded(3, 4))
case("select backward", lambda g: aten.select_backward.default(g, [7, 4], 1, -1), seeded(7))
case(
    "scatters",
    lambda a, s: (aten.slice_scatter.default(a, s, 0, 1, 6, 2), aten.select_scatter.default(a, s[0], 0, 3)),
    TABLE,
    seeded(3, 4),
)
grad_case("sort", lambda a: a.sort(1).values, A)
case("sort indices", lambda a: (*a.sort(1), *a.sort(0, descending=True), a.argsort(-1)), A)
grad_case("topk", lambda a: a.topk(2, 1).values, A)
case("topk indices", lambda a: (*a.topk(2, 0), *a.topk(3, 1, largest=False)), A)
case("one hot", lambda i: F.one_hot(i, 7), ROWS)
case("bucketing", lambda a: torch.bucketize(a, torch.tensor([-1.0, 0.0, 1.0])), A)
grad_case("diagonal", lambda a: a.diagonal(), seeded(4, 4))
grad_case("diag_embed", lambda a: torch.diag_embed(a), A)

# ---- shapes ----

grad_case("roll", lambda a: a.roll((1, 2), (0, 1)), A)
grad_case("flip", lambda a: a.flip((0, 1)), A)
grad_case("triangles", lambda a: a.tril() + 2 * a.triu(1), A)
grad_case("triangles of a batch", lambda a: a.tril(-1), seeded(2, 4, 5))
grad_case("cat and stack", lambda a, b: torch.stack([torch.cat([a, b], 0), torch.cat([b, a], 0)]), A, seeded(2, 5))
grad_case("split", lambda a: a.split([1, 4], 1)[1] * a.chunk(5, 1)[0] + a.unbind(0)[1][1:], A)
grad_case("expand", lambda a: a.unsqueeze(1).expand(4, 3, 5), A)
grad_case("repeat", lambda a: a.repeat(2, 3), A)
grad_case("repeat interleave", lambda a: a.repeat_interleave(3, 0), A)
grad_case("permute", lambda a: a.permute(2, 0, 1).contiguous().view(-1, 4), seeded(3, 4, 5))
grad_case("view back", lambda a: a.transpose(1, 2).reshape(3, 20), seeded(3, 4, 5))
grad_case("squeeze", lambda a: a.unsqueeze(0).squeeze(0).unsqueeze(-1).squeeze(), A)
grad_case("movedim", lambda a: a.movedim(0, -1), seeded(3, 4, 5))
grad_case("unfold", lambda a: a.unfold(1, 3, 2), A)
grad_case("im2col", lambda a: F.unfold(a, 3, padding=1), seeded(2, 3, 5, 6))
grad_case("col2im", lambda a: F.fold(a, (5, 6), 3, padding=1), seeded(2, 27, 30))
grad_case("pixel shuffle", lambda a: F.pixel_shuffle(a, 2), seeded(2, 8, 3, 4))
grad_case("pixel unshuffle", lambda a: F.pixel_unshuffle(a, 2), seeded(2, 2, 6, 4))
grad_case("pad", lambda a: F.pad(a, (1, 2, 0, 1), value=0.5), seeded(2, 3, 5, 6))
grad_case("pad negative", lambda a: F.pad(a, (-1, 2)), A)
for mode in ("reflect", "replicate", "circular"):
    grad_case(f"pad {mode} 1d", F.pad, seeded(2, 3, 5), pad=(2, 1), mode=mode)
    grad_case(f"pad {mode} 2d", F.pad, seeded(2, 3, 5, 6), pad=(1, 2, 0, 1), mode=mode)
    grad_case(f"pad {mode} 3d", F.pad, seeded(2, 3, 3, 4, 3), pad=(1, 2, 0, 1, 1, 1), mode=mode)
case(
    "new tensors",
    lambda a: (torch.zeros_like(a), a.new_ones(2, 3), torch.arange(5), torch.full((2,), 3.0), a.new_full((2,), 2)),
    A,
)
case("strided", lambda a: (torch.as_strided(a, (5, 4), (1, 5)), torch.as_strided(a, (2, 3), (10, 1), 6)), A)
case("clone of a view", lambda a: a.t().clone(memory_format=torch.contiguous_format).view(20), A)
case("casts", lambda a: (a.long(), a.double(), a.bool(), a.int(), a.to(torch.float16)), A)
case("scalars", lambda a: (aten.scalar_tensor.default(2.0) * a, torch.ones((), dtype=torch.int64) + 1), A)

# ---- upsampling ----

for mode, shape in [
    ("nearest", (2, 3, 5)),
    ("nearest-exact", (2, 3, 5)),
    ("linear", (2, 3, 5)),
    ("nearest", (2, 3, 4, 5)),
    ("nearest-exact", (2, 3, 4, 5)),
    ("bilinear", (2, 3, 4, 5)),
    ("bicubic", (2, 3, 4, 5)),
    ("nearest", (1, 2, 3, 4, 2)),
    ("nearest-exact", (1, 2, 3, 4, 2)),
    ("trilinear", (1, 2, 3, 4, 2)),
]:
    name = f"{mode} {len(shape) - 2}d"
    x, size = seeded(*shape), tuple(s + 3 for s in shape[2:])
    grad_case(f"upsample {name}", F.interpolate, x, scale_factor=2, mode=mode)
    grad_case(f"upsample to size {name}", F.interpolate, x, size=size, mode=mode)
    if "nearest" not in mode:
        grad_case(f"upsample corners {name}", F.interpolate, x, size=size, mode=mode, align_corners=True)
grad_case("downsample nearest", lambda x: F.interpolate(x, size=(3, 4), mode="nearest"), IMAGE)
grad_case("downsample nearest exact", lambda x: F.interpolate(x, size=(3, 4), mode="nearest-exact"), IMAGE)
grad_case("downsample bilinear", lambda x: F.interpolate(x, size=(3, 4), mode="bilinear"), IMAGE)
# There is nothing for its backward.
case("grid sample", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False), IMAGE, seeded(2, 4, 5, 2))

# ---- experts ----

grouped = aten._grouped_mm.default
ENDS = torch.tensor([8, 8, 16], dtype=torch.int32)  # the second group has no rows
FEWER = torch.tensor([4, 8, 11], dtype=torch.int32)
ROWS_OF_X, WEIGHTS, TALL, WIDE = seeded(16, 8), seeded(3, 8, 16), seeded(16, 16), seeded(8, 16)


def in_16_bits(f: Callable[..., Tensor], *xs: Tensor) -> Tensor:
    return f(*(x.bfloat16() for x in xs)).float()


case("grouped product half", lambda a, b, o: in_16_bits(partial(grouped, offs=o), a, b), ROWS_OF_X, WEIGHTS, ENDS)
case(
    "grouped product fewer half",
    lambda a, b, o: in_16_bits(partial(grouped, offs=o), a, b)[:11],
    ROWS_OF_X,
    WEIGHTS,
    FEWER,
)
case(
    "grouped product of columns half",
    lambda a, b, o: in_16_bits(partial(grouped, offs=o), a, b),
    WEIGHTS.mT.clone(),
    WIDE,
    ENDS,
)
case("grouped product over groups half", lambda a, b, o: in_16_bits(partial(grouped, offs=o), a, b), WIDE, TALL, ENDS)
case("grouped product of batches half", lambda a, b: in_16_bits(grouped, a, b), WEIGHTS, WEIGHTS.mT.clone())
grad_case(
    "grouped product gradient half", lambda a, b: in_16_bits(partial(grouped, offs=ENDS), a, b), ROWS_OF_X, WEIGHTS
)
TIES = whole(4, 64)
case("sort with ties", lambda a: (*aten.sort.stable(a, stable=True), a.argsort(stable=True, descending=True)), TIES)
case("sort of bools", lambda a: a.sort(stable=True, dim=0), TIES.view(8, 8) > 1)
case("kth and median", lambda a: (*a.kthvalue(2, 0), *a.median(1), *a.median(0, keepdim=True), a.median()), A)
grad_case("kth gradient", lambda a: a.kthvalue(2, 1).values, A)
SORTED = whole(9, 2, 6).cumsum(1)
case("searchsorted", lambda a, v: (torch.searchsorted(a, v), torch.searchsorted(a[0], v)), SORTED, whole(40, 2, 4))
case("searchsorted right", lambda a, v: torch.searchsorted(a, v, right=True, out_int32=True), SORTED, SORTED)
grad_case("index small", lambda a, i, j: a[i.int(), j], TABLE, whole(7, 6), whole(4, 6))
for own in (True, False):
    reduce = partial(torch.Tensor.scatter_reduce, reduce="mean", include_self=own)
    case(f"scatter mean {own}", lambda a, s, i, f=reduce: f(a, 1, i, s), TABLE, seeded(5, 3), whole(4, 5, 3))

# ---- whole layers ----


def lstm(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = c = x.new_zeros(x.shape[1], u.shape[1])
    out = []
    for step in x.unbind(0):
        i, f, g, o = (step @ w.t() + h @ u.t()).chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out.append(h)
    return torch.stack(out)


grad_case("lstm", lstm, seeded(3, 2, 4), seeded(12, 4), seeded(12, 3))


# One conversion has a price of its own, whatever it converts: cases share one, some dozens at a time.
NAMES = sorted(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("names", [NAMES[i::16] for i in range(16)], ids=range(16))
def test_onnxruntime_gives_what_aten_gives(names: list[str]) -> None:
    check({name: CASES[name] for name in names})


@pytest.mark.slow
@pytest.mark.parametrize("index", [-1, 5])
def test_an_index_out_of_range_raises(index: int) -> None:
    places = torch.tensor([0, index, 2])
    functions: dict[str, tuple[Callable[..., Tensor], Tensor]] = {
        "embedding": (lambda x, i: F.embedding(i, x), seeded(5, 4)),
        "loss": (lambda x, i: F.cross_entropy(x, i), seeded(3, 5)),
        "loss with weights": (lambda x, i: F.cross_entropy(x, i, torch.ones(5), ignore_index=-3), seeded(3, 5)),
    }
    for f, x in functions.values():
        with pytest.raises(IndexError):
            f(x, places)
        module = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x, places)
        (out,) = module.graph.output_node().args
        module.graph.output_node().args = ((out,),)
        model = convert(module, [x, places], ["x", "i"], ["out"])
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        with pytest.raises(Exception, match=r"(?i)out of (data )?(bounds|range)|within the inclusive range"):
            session.run(None, {"x": x.numpy(), "i": places.numpy()})
