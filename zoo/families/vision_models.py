"""Vision models of transformers: images and videos, to classes, pixels, depth and poses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from families.entry import CLASSES, VOCABULARY, ZooModel, text
from families.huggingface import SMALL, classes, transformers_model

# A vision transformer of 16 patches.
VIT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": CLASSES,
}  # fmt: skip
# Four stages of growing width, over images of 64 pixels.
WIDTHS = [16, 32, 48, 64]
STAGED: dict[str, Any] = {"num_labels": CLASSES, "image_size": 64, "hidden_sizes": WIDTHS, "depths": [1, 1, 2, 1]}
PYRAMID: dict[str, Any] = STAGED | {"depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 3, 4]}
WINDOWED: dict[str, Any] = {
    "num_labels": CLASSES, "image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4],
    "window_size": 4,
}  # fmt: skip
CONVNEXT = {
    "model_type": "convnext", "hidden_sizes": WIDTHS, "depths": [1, 1, 2, 1],
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}  # fmt: skip


def _vision(name: str, head: str, batch: Callable[[int], Any], base: dict[str, Any], **options: Any) -> ZooModel:
    return transformers_model(f"hf_{name}", head, "vision", batch, base=base, **options)


def _vit(name: str, head: str, **options: Any) -> ZooModel:
    return _vision(name, head, classes("pixel_values", 3, 32, 32), VIT, **options)


def _staged(name: str, head: str, base: dict[str, Any] = STAGED, **options: Any) -> ZooModel:
    return _vision(name, head, classes("pixel_values", 3, 64, 64), base, **options)


def _video(name: str, head: str, **options: Any) -> ZooModel:
    """Four frames."""
    return _vision(name, head, classes("pixel_values", 4, 3, 32, 32), VIT, num_frames=4, **options)


def _segmented(pixels: int) -> Callable[[int], Any]:
    return lambda size: {
        "pixel_values": torch.randn(size, 3, pixels, pixels),
        "labels": torch.randint(0, CLASSES, (size, pixels, pixels)),
    }


def _images(pixels: int) -> Callable[[int], Any]:
    return lambda size: torch.randn(size, 3, pixels, pixels)


def _mean_square(field: str) -> Callable[[nn.Module, Any], Tensor]:
    """For models without a loss of their own: the distance of an output from 1."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found: Tensor = getattr(model(batch), field)
        return (found - 1).square().mean()

    return loss


MODELS = (
    _vit("beit", "BeitForImageClassification", use_relative_position_bias=True),
    _vision("beit_semantic", "BeitForSemanticSegmentation", _segmented(32), VIT, use_relative_position_bias=True,
        out_indices=[1, 2, 3, 4]),
    _staged("bit", "BitForImageClassification", embedding_size=16, hidden_sizes=[32, 64, 96, 128], num_groups=8),
    _staged("convnext", "ConvNextForImageClassification"),
    _staged("convnextv2", "ConvNextV2ForImageClassification"),
    _vit("data2vec_vision", "Data2VecVisionForImageClassification", use_relative_position_bias=True),
    _vit("deit", "DeiTForImageClassification"),
    _vision("depth_anything", "DepthAnythingForDepthEstimation", _images(28), {}, loss=_mean_square("predicted_depth"),
        backbone_config={"model_type": "dinov2", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "image_size": 28, "patch_size": 7, "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False},
        reassemble_hidden_size=32, patch_size=7, neck_hidden_sizes=[8, 16, 32, 32], fusion_hidden_size=16,
        head_hidden_size=8),
    _vit("dinov2", "Dinov2ForImageClassification", mlp_ratio=2),
    _vit("dinov2_registers", "Dinov2WithRegistersForImageClassification", mlp_ratio=2),
    _vision("dinov3_vit", "DINOv3ViTModel", _images(32), VIT, loss=_mean_square("pooler_output")),
    _vision("dpt", "DPTForSemanticSegmentation", _segmented(32), VIT, backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32], fusion_hidden_size=32, reassemble_factors=[4, 2, 1, 0.5], is_hybrid=False),
    _staged("focalnet", "FocalNetForImageClassification", embed_dim=16),
    _vision("glpn", "GLPNForDepthEstimation",
        lambda size: {"pixel_values": torch.randn(size, 3, 64, 64), "labels": torch.rand(size, 64, 64)}, PYRAMID,
        decoder_hidden_size=32,
        refused=(r"modeling_glpn.*\[valid_mask\]", "its loss picks the valid pixels with a boolean mask")),
    _staged("hgnet_v2", "HGNetV2ForImageClassification", {"num_labels": CLASSES}),
    _staged("hiera", "HieraForImageClassification", {"num_labels": CLASSES}, image_size=[64, 64], embed_dim=16,
        depths=[1, 1, 2, 1], num_heads=[1, 2, 2, 4]),
    _vit("ijepa", "IJepaForImageClassification"),
    # One word more than there are colours: the one that every image begins with, which is never guessed.
    _vision("imagegpt", "ImageGPTForCausalImageModeling", text, SMALL, n_inner=128, vocab_size=VOCABULARY + 1),
    _staged("levit", "LevitForImageClassification", hidden_sizes=[32, 48, 64], num_attention_heads=[2, 3, 4],
        depths=[2, 2, 2], key_dim=[8, 8, 8]),
    _staged("mobilenet_v1", "MobileNetV1ForImageClassification", {"num_labels": CLASSES}, depth_multiplier=0.5),
    _staged("mobilenet_v2", "MobileNetV2ForImageClassification", {"num_labels": CLASSES}),
    _staged("mobilevit", "MobileViTForImageClassification", hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[8, 16, 24, 32, 48, 64, 80], depths=None),
    _staged("mobilevitv2", "MobileViTV2ForImageClassification", {"num_labels": CLASSES}, image_size=64),
    _staged("poolformer", "PoolFormerForImageClassification", depths=[1, 1, 1, 1]),
    _staged("pvt", "PvtForImageClassification", PYRAMID),
    _staged("pvt_v2", "PvtV2ForImageClassification", PYRAMID),
    _staged("regnet", "RegNetForImageClassification", embedding_size=16, groups_width=16),
    _staged("resnet", "ResNetForImageClassification", embedding_size=16, hidden_sizes=[32, 48, 64, 96]),
    _staged("segformer", "SegformerForImageClassification", PYRAMID),
    _vision("segformer_semantic", "SegformerForSemanticSegmentation", _segmented(64), PYRAMID, decoder_hidden_size=32),
    _staged("swiftformer", "SwiftFormerForImageClassification", embed_dims=WIDTHS),
    _staged("swin", "SwinForImageClassification", WINDOWED, random=True),
    _vision("swin2sr", "Swin2SRForImageSuperResolution", _images(16), {}, loss=_mean_square("reconstruction"),
        image_size=16, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4),
    _staged("swinv2", "Swinv2ForImageClassification", WINDOWED),
    _staged("textnet", "TextNetForImageClassification", {"num_labels": CLASSES}),
    _video("timesformer", "TimesformerForVideoClassification"),
    _vision("upernet", "UperNetForSemanticSegmentation", _segmented(64), {"num_labels": CLASSES}, hidden_size=32,
        backbone_config=CONVNEXT, auxiliary_in_channels=48, auxiliary_channels=16),
    _video("videomae", "VideoMAEForVideoClassification"),
    _vit("vit", "ViTForImageClassification"),
    _vision("vit_mae", "ViTMAEForPreTraining", lambda size: {"pixel_values": torch.randn(size, 3, 32, 32)}, VIT,
        decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_intermediate_size=64,
        decoder_num_attention_heads=4),
    _vit("vit_msn", "ViTMSNForImageClassification"),
    _vision("vitpose", "VitPoseForPoseEstimation", _images(32), {}, loss=_mean_square("heatmaps"), num_labels=5,
        backbone_config={"model_type": "vitpose_backbone", "image_size": [32, 32], "patch_size": [8, 8],
        "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "out_indices": [4]}),
    _video("vivit", "VivitForVideoClassification", tubelet_size=[2, 8, 8]),
    _vision("vjepa2", "VJEPA2ForVideoClassification", classes("pixel_values_videos", 4, 3, 32, 32), VIT, crop_size=32,
        frames_per_clip=4, pred_hidden_size=48, pred_num_attention_heads=4, pred_num_hidden_layers=2),
)  # fmt: skip
