"""Frozen weights in the packed forms of libraries, under adapters: equal to eager PyTorch, and back into its model.

That packed weights keep the law on every axis is in `tests/law` (`model=packed`).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import packed_tensors
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import fxpipe
from fxpipe.errors import BuildError, CaptureError, TaskError
from fxpipe.inspection.facts import packed_bytes
from fxpipe.stages.pure_function import all_float64
from fxpipe.task.wrapped_tensors import packed_as

STEPS = 3


@torch.no_grad()
def _waved(model: nn.Module) -> nn.Module:
    """The model; what is trained has values that depend on nothing that is drawn."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            waves = torch.sin(torch.arange(parameter.numel()) * 0.7)
            parameter.copy_(0.1 * waves.view(parameter.shape))
    return model


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return _waved(LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, use_cache=False, **sizes)))


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    modules = [m for m in model.modules() if m is not model]  # lm_head stays
    return [(m, name, child) for m in modules for name, child in m.named_children() if type(child) is nn.Linear]


def _bitsandbytes(model: nn.Module, bits: int = 4, kind: str = "nf4") -> nn.Module:
    import bitsandbytes as bnb

    for module, name, linear in _linears(model):
        size: Any = (linear.in_features, linear.out_features, False)
        if bits == 4:
            packed: nn.Module = bnb.nn.Linear4bit(*size, compute_dtype=torch.float32, quant_type=kind)
        else:
            packed = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
        packed.load_state_dict(linear.state_dict())
        setattr(module, name, packed.to("cpu"))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = bits == 4, bits == 8  # type: ignore[assignment]
    return model.requires_grad_(False)


def _torchao(model: nn.Module, kind: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao import quantization

        chosen = {id(linear) for *_, linear in _linears(model)}
        quantization.quantize_(model, getattr(quantization, kind)(), lambda module, name: id(module) in chosen)
    return model.requires_grad_(False)


def _peft(model: nn.Module, **more: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"} | more
    return get_peft_model(model, LoraConfig(**config))


class NF4(nn.Module):
    """torchao's own layer, which dequantizes again in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, 64), nn.Linear(64, 32)
        self.packed = nn.ParameterList(self._packed(_waved(nn.Linear(64, 64)).weight) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    @staticmethod
    def _packed(weight: Tensor) -> nn.Parameter:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        return nn.Parameter(to_nf4(weight.detach(), 64, 16), requires_grad=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        x = self.embed(input_ids)
        for weight, adapter in zip(self.packed, self.adapters, strict=True):
            x = x + torch.tanh(linear_nf4(x, weight) + adapter(x))
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


def _checkpointed() -> nn.Module:
    model: Any = _bitsandbytes(_llama())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return _peft(model)


PACKED: dict[str, Callable[[], nn.Module]] = {
    "bitsandbytes, fp4, and a trained head": lambda: _peft(
        _bitsandbytes(_llama(), 4, "fp4"), modules_to_save=["lm_head"]
    ),
    "bitsandbytes, nf4, DoRA": lambda: _peft(_bitsandbytes(_llama()), use_dora=True),
    "bitsandbytes, nf4, checkpointed": _checkpointed,
    "bitsandbytes, 8 bits": lambda: _peft(_bitsandbytes(_llama(), 8)),
    "torchao, nf4": NF4,
    "torchao, int8": lambda: _peft(_torchao(_llama(), "Int8WeightOnlyConfig")),
    "torchao, float8": lambda: _peft(_torchao(_llama(), "Float8WeightOnlyConfig")),
}


def _loss(model: nn.Module, batch: Any) -> Tensor:
    loss: Tensor = model(**batch)["loss"]
    return loss


def _batches() -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": (ids := torch.randint(32, (4, 8), generator=draw)), "labels": ids} for _ in range(STEPS)]


def _optimizer(named: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in named if p.requires_grad], lr=1e-2)


QUICK = ("bitsandbytes, fp4, and a trained head", "bitsandbytes, 8 bits", "torchao, nf4")


def _each(packed: dict[str, Callable[[], nn.Module]]) -> Any:
    marks = {name: () if name in QUICK else (pytest.mark.slow,) for name in packed}
    return pytest.mark.parametrize("make", [pytest.param(packed[n], id=n, marks=m) for n, m in marks.items()])


@_each(PACKED)
@pytest.mark.filterwarnings("ignore")
def test_a_packed_model_trains_as_in_eager_pytorch(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """On two workers, to the bit; its file loads into the user's own model, and names are its own."""
    model, batches = _waved(make()), _batches()
    build = fxpipe.compile(
        model, _loss, batches[0], workers=2, schedule="1f1b", microbatches=1, cost="analytic", optimizer=_optimizer
    )
    packed = [row for row in build.plan.tensors if row.tensor.dtype in ("uint8", "int8", "float8_e4m3fn")]
    assert packed, "packed bytes are what stages own"
    [form] = {row.packed for row in build.plan.parameters if row.packed}
    weights = [(name, p) for name, p in model.named_parameters() if packed_as(p)]
    parts = [part for weight in weights for _, part in packed_tensors.parts(*weight)]
    assert packed_bytes(build.plan)[form] >= sum(part.nbytes for part in parts) > 0
    pipeline = build.local(optimizer=_optimizer)
    losses = [float(pipeline.step(batch)) for batch in batches]
    optimizer, wanted = _optimizer(list(model.named_parameters())), []
    for batch in batches:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        wanted.append(float(loss))
    assert losses == wanted
    state = pipeline.state_dict()
    theirs = {part for name, value in model.state_dict().items() for part, _ in packed_tensors.parts(name, value)}
    assert state.keys() == theirs
    other = make()
    fxpipe.load_weights(other, state)
    assert float(_loss(other, batches[0])) == float(_loss(model, batches[0]))


WITHOUT_VALUES = {name: make for name, make in PACKED.items() if "DoRA" not in name}
"""Of DoRA peft makes copies of layers, which bitsandbytes does not without values."""


@_each(WITHOUT_VALUES)
@pytest.mark.filterwarnings("ignore")
def test_without_values_it_gets_them_from_the_model_when_it_runs(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """What each worker packs by itself is what one process packs of the whole model."""
    options: Any = {"workers": 2, "schedule": "1f1b", "microbatches": 1, "cost": "analytic", "optimizer": _optimizer}
    [batch, *_] = _batches()
    if make is PACKED["bitsandbytes, 8 bits"]:
        with pytest.raises(TaskError, match="8 bits"):
            fxpipe.compile(fxpipe.on_meta(make).model, _loss, batch, **options)
        return
    build = fxpipe.compile(fxpipe.on_meta(lambda: _waved(make())).model, _loss, batch, **options)
    pipeline = build.local(model=lambda: _waved(make()), optimizer=_optimizer)
    model = _waved(make())
    state = pipeline.state_dict()
    for name, value in model.state_dict().items():
        for part, plain in packed_tensors.parts(name, value):
            if ".quant_state." in part:
                assert bytes(state[part].numpy()).rstrip() == bytes(plain.numpy())
            else:
                assert torch.equal(state[part], plain)
    assert float(pipeline.step(batch)) == float(_loss(model, batch))
    save_file(state, saved := tmp_path / "packed.safetensors")
    with pytest.raises(BuildError, match="without --weights") if any(".quant_" in n for n in state) else nullcontext():
        build.local(model=lambda: _waved(make()), weights=str(saved))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_float64_operators_get_scales_as_they_are_packed(dtype: torch.dtype) -> None:
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(256, 256, False, compute_dtype=dtype, quant_type="nf4")
    layer.load_state_dict({"weight": torch.sin(torch.arange(256.0 * 256)).view(256, 256)})
    layer, x = layer.to("cpu"), torch.cos(torch.arange(4 * 256.0)).view(4, 256)
    weight = bnb.functional.dequantize_4bit(layer.weight, layer.weight.quant_state).double()
    with all_float64():
        precise = copy.deepcopy(layer).double()(x.double())
    torch.testing.assert_close(precise, x.double() @ weight.T, rtol=1e-5, atol=1e-5)


def test_a_packed_weight_that_is_trained_is_refused() -> None:
    model = packed_tensors.adapted()
    model[1].weight.requires_grad_(True)
    with pytest.raises(CaptureError, match=r"1\.weight is trained, and is a Packed, which wraps") as caught:
        fxpipe.capture(model, lambda m, x: m(x).square().mean(), torch.randn(4, 6))
    assert "requires_grad_(False)" in str(caught.value)


def _built(model: nn.Module, **more: Any) -> fxpipe.Build:
    batch = torch.randn(4, 6)
    return fxpipe.compile(model, lambda m, x: m(x).square().mean(), batch, workers=2, cost="analytic", **more)


def test_what_hangs_on_a_wrapper_is_there_when_it_is_traced() -> None:
    class Scaled(packed_tensors.Adapted):
        def forward(self, x: Tensor) -> Tensor:
            assert isinstance(self.weight, nn.Parameter)
            return super().forward(x) * getattr(self.weight, "factor", 1.0)

    model = nn.Sequential(Scaled(6), nn.Linear(6, 5))
    model[0].weight.factor = 3.0  # type: ignore[union-attr,assignment]
    batch = torch.randn(4, 6)
    loss = _built(model, schedule="1f1b").local().step(batch)
    assert float(loss) == pytest.approx(float(model(batch).square().mean()))


@pytest.mark.filterwarnings("ignore")
def test_weights_of_8_bits_load_into_the_model_that_was_captured() -> None:
    import bitsandbytes as bnb

    model = nn.Sequential(nn.Linear(6, 6), bnb.nn.Linear8bitLt(6, 6, has_fp16_weights=False).to("cpu"), nn.Linear(6, 5))
    model[1].requires_grad_(False)
    state = _built(model).local().state_dict()
    fxpipe.load_weights(model, state)
    with pytest.raises(TaskError, match=r"0\.bias is missing, more is not in the model"):
        fxpipe.load_weights(
            model, {name: value for name, value in state.items() if name != "0.bias"} | {"more": state["0.bias"]}
        )


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_that_is_packed_in_another_form_is_refused(tmp_path: Path) -> None:
    import bitsandbytes as bnb

    def model(seed: int, kind: str) -> nn.Module:
        torch.manual_seed(seed)
        packed = bnb.nn.Linear4bit(64, 64, compute_dtype=torch.float32, quant_type=kind).to("cpu")
        return nn.Sequential(nn.Linear(6, 64), packed.requires_grad_(False), nn.Linear(64, 5))

    build, other = _built(model(0, "nf4")), _built(model(0, "fp4"))
    save_file(other.local().state_dict(), tmp_path / "other.safetensors")
    with pytest.raises(BuildError, match=r"the checkpoint does not fit|packed in another form"):
        build.local(weights=str(tmp_path / "other.safetensors"))
    save_file(build.local().state_dict(), tmp_path / "own.safetensors")
    build.local(weights=str(tmp_path / "own.safetensors"))
