"""Nine small models of real architectures, dropout where they have it: every engine is tested on all of them."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import (
    CLASSES,
    LENGTH,
    TIMM,
    TRANSFORMERS,
    VISION,
    VOCABULARY,
    ZooModel,
    classify,
    gaps,
    images,
    next_token,
    own_loss,
    segmented,
    text,
    tokens,
)


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
    """Two convolutions with batch norm and ReLU."""

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


CORE = {
    entry.name: entry
    for entry in (
        ZooModel("vgg16", _vgg16, classify, images(32), needs=VISION),
        ZooModel("resnet18", _resnet18, classify, images(64), needs=VISION),
        ZooModel("inception-v4", _inception_v4, classify, images(107), needs=TIMM),
        ZooModel("vit", _vit, classify, images(32), needs=TIMM),
        ZooModel("gpt2", _gpt2, own_loss, text, needs=TRANSFORMERS),
        ZooModel("llama", _llama, own_loss, text, needs=TRANSFORMERS),
        ZooModel("bert", _bert, own_loss, gaps, needs=TRANSFORMERS),
        ZooModel("residual-lstm", ResidualLSTM, next_token, tokens),
        ZooModel("unet", UNet, classify, segmented(32)),
    )
}
