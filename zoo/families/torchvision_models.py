"""torchvision: classification of images and videos, segmentation, optical flow, backbones and losses of detection."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import CLASSES, VISION, ZooModel, classify, images, segmented, videos

KIND = "torchvision"


def _made(name: str, module: str = "torchvision.models", **options: Any) -> Callable[[], nn.Module]:
    """A builder of torchvision, without weights."""

    def make() -> nn.Module:
        build = getattr(importlib.import_module(module), name)
        return build(weights=None, num_classes=CLASSES, **options)

    return make


def _entry(name: str, model: Callable[[], nn.Module], loss: Any, batch: Any, size: int = 4, **more: Any) -> ZooModel:
    return ZooModel(name, model, loss, batch, size, VISION, KIND, **more)


def _image(name: str, pixels: int = 64, size: int = 8, random: bool = False, **options: Any) -> ZooModel:
    """Batch norm wants some values even where a map has one pixel: four samples in a microbatch."""
    return _entry(name, _made(name, **options), classify, images(pixels), size, random=random)


def _video(name: str, frames: int, pixels: int, size: int = 4, **options: Any) -> ZooModel:
    return _entry(name, _made(name, "torchvision.models.video", **options), classify, videos(frames, pixels), size)


def _segmenting(name: str, loss: Any, pixels: int = 64, **options: Any) -> ZooModel:
    model = _made(name, "torchvision.models.segmentation", weights_backbone=None, **options)
    return _entry(name, model, loss, segmented(pixels), 8)


def _maxvit() -> nn.Module:
    """MaxViT-T with windows of two instead of seven, for small images."""
    from torchvision.models.maxvit import MaxVit

    return MaxVit(
        input_size=(64, 64), stem_channels=64, partition_size=2, block_channels=[64, 128, 256, 512],
        block_layers=[2, 2, 5, 2], head_dim=32, stochastic_depth_prob=0.2, num_classes=CLASSES,
    )  # fmt: skip


def _mvit() -> nn.Module:
    """MViT-v2 in three scales of two blocks: the library's own builders take no smaller videos."""
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    widths, pools = (48, 96, 96, 192, 192, 384), ((1, 1, 1), (1, 2, 2), (1, 1, 1), (1, 2, 2), (1, 1, 1), (1, 2, 2))
    keys = ((1, 4, 4), (1, 2, 2), (1, 2, 2), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    blocks = [
        MSBlockConfig(max(1, width // 48), before, width, [3, 3, 3], [3, 3, 3], list(pool), list(key))
        for before, width, pool, key in zip((48, *widths[:-1]), widths, pools, keys, strict=True)
    ]
    return MViT(
        spatial_size=(64, 64), temporal_size=8, block_setting=blocks, residual_pool=True,
        residual_with_cls_embed=False, rel_pos_embed=True, proj_after_attn=True, num_classes=CLASSES,
        stochastic_depth_prob=0.1,
    )  # fmt: skip


def _googlenet_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    main, second, first = model(x)
    return F.cross_entropy(main, y) + 0.3 * (F.cross_entropy(second, y) + F.cross_entropy(first, y))


def _inception_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    main, aux = model(x)
    return F.cross_entropy(main, y) + 0.4 * F.cross_entropy(aux, y)


def _segmentation_loss(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    found = model(x)
    loss = F.cross_entropy(found["out"], y)
    return loss + 0.5 * F.cross_entropy(found["aux"], y) if "aux" in found else loss


def _feature_pyramid() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=5)


def _mobilenet_pyramid() -> nn.Module:
    from torchvision.models.detection.backbone_utils import mobilenet_backbone

    return mobilenet_backbone(
        backbone_name="mobilenet_v3_large", weights=None, fpn=True, norm_layer=nn.BatchNorm2d, trainable_layers=6
    )


def _ssd_features() -> nn.Module:
    from torchvision.models import vgg16
    from torchvision.models.detection.ssd import _vgg_extractor

    return _vgg_extractor(vgg16(weights=None), highres=False, trainable_layers=5)


def _features_loss(model: nn.Module, batch: Any) -> Tensor:
    """The mean square of every map."""
    return torch.stack([m.square().mean() for m in model(batch).values()]).sum()


def _pictures(pixels: int) -> Callable[[int], Any]:
    return lambda size: torch.randn(size, 3, pixels, pixels)


class RetinaHead(nn.Module):
    """RetinaNet's pyramid and heads on feature maps, without the matching of boxes, which depends on their values."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection.retinanet import RetinaNetHead

        self.backbone = _feature_pyramid()
        self.head = RetinaNetHead(self.backbone.out_channels, num_anchors=9, num_classes=CLASSES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.head(list(self.backbone(x).values()))


def _anchors_loss(model: nn.Module, batch: Any) -> Tensor:
    """Focal loss and smooth L1 over all anchors, as after matching."""
    from torchvision.ops import sigmoid_focal_loss

    x, classes, boxes = batch
    found = model(x)
    count = found["cls_logits"].shape[1]
    one_hot = F.one_hot(classes, CLASSES).float()[:, None].expand(-1, count, -1)
    focal = sigmoid_focal_loss(found["cls_logits"], one_hot, reduction="mean")
    return focal + F.smooth_l1_loss(found["bbox_regression"], boxes[:, None].expand(-1, count, -1))


def _anchored(size: int) -> Any:
    return torch.randn(size, 3, 64, 64), torch.randint(0, CLASSES, (size,)), torch.randn(size, 4)


def _detecting(name: str, **options: Any) -> ZooModel:
    """A whole detector. Its losses match anchors to boxes by their values."""
    model = _made(name, "torchvision.models.detection", weights_backbone=None, min_size=64, max_size=64, **options)
    reason = "scales, filters and matches boxes by their values; its backbone, pyramid and heads are captured alone"
    return _entry(name, model, _detection_loss, _boxed, refused=("depends on the values of a tensor", reason))


def _detection_loss(model: nn.Module, batch: Any) -> Tensor:
    pictures, boxes, labels = batch
    targets = [{"boxes": b, "labels": k} for b, k in zip(boxes, labels, strict=True)]
    return torch.stack(list(model(list(pictures), targets).values())).sum()


def _boxed(size: int) -> Any:
    corners = torch.rand(size, 3, 2) * 30
    boxes = torch.cat([corners, corners + 5 + torch.rand(size, 3, 2) * 25], -1)
    return torch.rand(size, 3, 64, 64), boxes, torch.randint(1, CLASSES, (size, 3))


def _raft() -> nn.Module:
    from torchvision.models.optical_flow import raft_small

    return raft_small(weights=None)


def _flow_loss(model: nn.Module, batch: Any) -> Tensor:
    """The error of every iteration's flow, later ones weighing more."""
    before, after, flow = batch
    found = model(before, after, num_flow_updates=3)
    return torch.stack([0.8 ** (len(found) - k) * (f - flow).abs().mean() for k, f in enumerate(found)]).sum()


def _flows(size: int) -> Any:
    return torch.randn(size, 3, 128, 128), torch.randn(size, 3, 128, 128), torch.randn(size, 2, 128, 128)


MODELS = (
    _image("alexnet", random=True),
    _image("vgg16", 32, 4),
    _image("resnet18"),
    _image("resnet50"),
    _image("resnet152"),
    _image("resnext50_32x4d"),
    _image("wide_resnet50_2", size=4),
    _image("densenet121"),
    _entry("googlenet", _made("googlenet", init_weights=False), _googlenet_loss, images(128), 8),
    _entry("inception_v3", _made("inception_v3", init_weights=False), _inception_loss, images(299), 4),
    _image("squeezenet1_1"),
    _image("shufflenet_v2_x1_0"),
    _image("mobilenet_v2", random=True),
    _image("mobilenet_v3_large"),
    _image("mnasnet1_0"),
    _image("efficientnet_b0", random=True),
    _image("efficientnet_v2_s"),
    _image("regnet_x_400mf"),
    _image("regnet_y_400mf"),
    _image("convnext_tiny", size=4),
    _image("swin_t", size=4, random=True),
    _image("swin_v2_t", size=4),
    _image("vit_b_16", 32, 4, image_size=32),
    _entry("maxvit_t", _maxvit, classify, images(64), 8),
    _video("r3d_18", 8, 32),
    _video("mc3_18", 8, 32),
    _video("r2plus1d_18", 8, 32),
    _video("s3d", 16, 209, 2),  # the least that its last pooling can take
    _entry("mvit_v2", _mvit, classify, videos(8, 64)),
    _video("swin3d_t", 8, 64),
    _segmenting("fcn_resnet50", _segmentation_loss, aux_loss=True),
    _segmenting("deeplabv3_resnet50", _segmentation_loss, aux_loss=True),
    _segmenting("deeplabv3_mobilenet_v3_large", _segmentation_loss),
    _segmenting("lraspp_mobilenet_v3_large", _segmentation_loss, 128),
    _entry("resnet50_fpn", _feature_pyramid, _features_loss, _pictures(64), 8),
    _entry("mobilenet_v3_fpn", _mobilenet_pyramid, _features_loss, _pictures(64), 8),
    _entry("ssd300_vgg16_features", _ssd_features, _features_loss, _pictures(300), 2),
    _entry("retinanet_heads", RetinaHead, _anchors_loss, _anchored, 8),
    _entry("raft_small", _raft, _flow_loss, _flows, 4),
    _detecting("retinanet_resnet50_fpn"),
    _detecting("fcos_resnet50_fpn"),
    _detecting("fasterrcnn_resnet50_fpn"),
)
