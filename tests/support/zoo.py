"""Small models of real architectures: random weights, dropout where they have it, nothing downloaded."""

from __future__ import annotations

import functools
import importlib.util
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

CLASSES, VOCABULARY, LENGTH = 10, 199, 16


@functools.cache
def define_torchvision_ops() -> torch.library.Library | None:
    """Declare what `import torchvision` looks up, where its compiled part is for another build of torch."""
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


def _vgg16() -> nn.Module:
    """VGG16 with the head that is usual for small images: torchvision's own has 120 million weights."""
    from torchvision.models import vgg

    model = nn.Sequential(
        OrderedDict(
            features=vgg.make_layers(vgg.cfgs["D"]),
            avgpool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(nn.Linear(512, 512), nn.ReLU(True), nn.Dropout(), nn.Linear(512, CLASSES)),
        )
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _resnet18() -> nn.Module:
    from torchvision.models import resnet18

    return resnet18(weights=None, num_classes=CLASSES)


def _inception_v4() -> nn.Module:
    """The stem and one block of each kind."""
    from timm.models.inception_v4 import InceptionV4

    model = InceptionV4(num_classes=CLASSES, drop_rate=0.2)
    kinds = {type(block): block for block in reversed(model.features[3:])}
    model.features = nn.Sequential(*model.features[:3], *reversed(kinds.values()))
    return model


def _vit() -> nn.Module:
    """ViT-Ti's width and heads, four of its twelve blocks."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=192, depth=4, num_heads=3, num_classes=CLASSES,
        drop_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1,
    )  # fmt: skip


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": LENGTH}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, use_cache=False, **sizes, **ends))
    model.loss_type = "ForCausalLM"  # the default, of which transformers else warns
    return model


def _llama() -> nn.Module:
    """Two key-value heads for four of queries."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes, **heads))


def _bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "max_position_embeddings": LENGTH}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, num_attention_heads=4, use_cache=False, **sizes))


class ResidualLSTM(nn.Module):
    """LSTM layers with residual sums and dropout, as in GNMT; predicts the next token."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([nn.LSTM(width, width, batch_first=True) for _ in range(depth)])
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + self.dropout(layer(x)[0])
        return self.head(x)


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        for width in (inputs, outputs):
            self.append(nn.Conv2d(width, outputs, 3, padding=1, bias=False))
            self.append(nn.BatchNorm2d(outputs))
            self.append(nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Classifies pixels; goes up by transposed convolutions and, the last time, by interpolation."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        a, b, c, d = (width * 2**i for i in range(4))
        self.stem = DoubleConv(3, a)
        self.down = nn.ModuleList([DoubleConv(a, b), DoubleConv(b, c), DoubleConv(c, d)])
        self.rise = nn.ModuleList(
            [
                nn.ConvTranspose2d(d, c, 2, stride=2),
                nn.ConvTranspose2d(c, b, 2, stride=2),
                nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear"), nn.Conv2d(b, a, 1)),
            ]
        )
        self.up = nn.ModuleList([DoubleConv(2 * c, c), DoubleConv(2 * b, b), DoubleConv(2 * a, a)])
        self.head = nn.Conv2d(a, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for layer in self.down:
            skips.append(layer(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for rise, layer in zip(self.rise, self.up, strict=True):
            x = layer(torch.cat([skips.pop(), rise(x)], 1))
        return self.head(x)


def _classify(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def _next_token(model: nn.Module, batch: Any) -> Tensor:
    ids, targets = batch
    return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss that a model of transformers computes itself."""
    return model(**batch).loss


def _images(pixels: int) -> Callable[[int], Any]:
    return lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(0, CLASSES, (size,)))


def _pixels(size: int) -> Any:
    return torch.randn(size, 3, 32, 32), torch.randint(0, CLASSES, (size, 32, 32))


def _tokens(size: int) -> Any:
    """Short ones: capture unrolls every step of an LSTM."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH // 2 + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def _text(size: int) -> Any:
    ids = torch.randint(0, VOCABULARY, (size, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def _gaps(size: int) -> Any:
    """Padded texts, of which every third token is to be guessed."""
    ids = torch.randint(5, VOCABULARY, (size, LENGTH))
    present = torch.arange(LENGTH) < torch.randint(LENGTH // 2, LENGTH + 1, (size, 1))
    hidden = present & (torch.arange(LENGTH) % 3 == 1)
    return {
        "input_ids": ids.masked_fill(hidden, 4).masked_fill(~present, 0),
        "attention_mask": present.long(),
        "labels": ids.masked_fill(~hidden, -100),
    }


@dataclass(frozen=True)
class ZooModel:
    """A model with its step.

    Attributes:
        size: samples in a minibatch.
        needs: packages that `make` imports.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    size: int = 4
    needs: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """Why the model cannot be made here, if it cannot."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"{' and '.join(absent)} not installed; `make venv` installs it" if absent else None

    def make(self, seed: int = 0) -> tuple[nn.Module, Callable[[nn.Module, Any], Tensor], Any]:
        """The module, the loss function and one minibatch."""
        define_torchvision_ops()
        torch.manual_seed(seed)
        model = self.model()
        return model, self.loss, self.batches(1)[0]

    def batches(self, count: int) -> list[Any]:
        torch.manual_seed(1234)
        return [self.batch(self.size) for _ in range(count)]


TIMM = ("timm", "torchvision", "huggingface_hub", "yaml")
ZOO = {
    entry.name: entry
    for entry in (
        ZooModel("vgg16", _vgg16, _classify, _images(32), needs=("torchvision",)),
        ZooModel("resnet18", _resnet18, _classify, _images(64), needs=("torchvision",)),
        ZooModel("inception-v4", _inception_v4, _classify, _images(107), needs=TIMM),
        ZooModel("vit", _vit, _classify, _images(32), needs=TIMM),
        ZooModel("gpt2", _gpt2, _own_loss, _text, needs=("transformers",)),
        ZooModel("llama", _llama, _own_loss, _text, needs=("transformers",)),
        ZooModel("bert", _bert, _own_loss, _gaps, needs=("transformers",)),
        ZooModel("residual-lstm", ResidualLSTM, _next_token, _tokens),
        ZooModel("unet", UNet, _classify, _pixels),
    )
}
