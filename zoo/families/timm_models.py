"""timm: one small model of each family, at full depth, on small images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from families.entry import CLASSES, TIMM, ZooModel, classify, images

CONVOLUTION, ATTENTION, HYBRID = "timm: convolution", "timm: attention and mixing", "timm: hybrid"


def _made(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)

    return make


def _named(kind: str, name: str, known: str, pixels: int, sized: bool, **more: Any) -> ZooModel:
    """The entry `timm_name` of a model that timm knows as `known`; `sized` models must be told the images' size."""
    options = {"img_size": pixels} if sized else {}
    options |= more.pop("options", {})
    return ZooModel(f"timm_{name}", _made(known, **options), classify, images(pixels), 4, TIMM, kind, **more)


def _convolution(name: str, known: str = "", pixels: int = 64, **more: Any) -> ZooModel:
    return _named(CONVOLUTION, name, known or name, pixels, sized=False, **more)


def _attention(name: str, known: str = "", pixels: int = 64, sized: bool = True, **more: Any) -> ZooModel:
    return _named(ATTENTION, name, known or name, pixels, sized, **more)


def _hybrid(name: str, known: str = "", pixels: int = 64, sized: bool = True, **more: Any) -> ZooModel:
    return _named(HYBRID, name, known or name, pixels, sized, **more)


def _distilled(model: nn.Module, batch: Any) -> Tensor:
    """Both heads of a distilled transformer, which in train mode gives a tuple."""
    x, y = batch
    found = model(x)
    heads = found if isinstance(found, tuple) else (found,)
    return sum((F.cross_entropy(head, y) for head in heads), F.cross_entropy(heads[0], y) * 0) / len(heads)


MODELS = (
    _convolution("convnext", "convnext_atto", random=True, options={"drop_path_rate": 0.1}),
    _convolution("cspnet", "cspresnet50"),
    _convolution("darknet", "cspdarknet53"),
    _convolution("densenet", "densenet121"),
    _convolution("dla", "dla34"),
    _convolution("dpn", "dpn48b"),
    _convolution("efficientnet_v2", "tf_efficientnetv2_b0"),
    _convolution("fasternet", "fasternet_t0"),
    _convolution("fbnet", "fbnetc_100"),
    _convolution("ghostnet", "ghostnet_100"),
    _convolution("hardcorenas", "hardcorenas_a"),
    _convolution("hgnet", "hgnetv2_b0"),
    _convolution("hrnet", "hrnet_w18_small"),
    _convolution("inception_next", "inception_next_atto"),
    _convolution("inception_resnet_v2", pixels=96),
    _convolution("lcnet", "lcnet_050"),
    _convolution("mambaout", "mambaout_femto"),
    _convolution("mixnet", "mixnet_s"),
    _convolution("mobilenet_v4", "mobilenetv4_conv_small"),
    _convolution("mobileone", "mobileone_s0"),
    _convolution("nf_regnet", "nf_regnet_b0"),
    _convolution("nf_resnet", "nf_resnet26"),
    _convolution("nfnet", "eca_nfnet_l0"),
    _convolution("rdnet", "rdnet_tiny"),
    _convolution("regnet", "regnety_002"),
    _convolution("repghost", "repghostnet_050"),
    _convolution("repvgg", "repvgg_a0"),
    _convolution("repvit", "repvit_m0_9"),
    _convolution("res2net", "res2net50_26w_4s"),
    _convolution("resnest", "resnest14d"),
    _convolution("resnet_v2", "resnetv2_50"),
    _convolution("rexnet", "rexnet_100"),
    _convolution("selecsls", "selecsls42b"),
    _convolution("senet", "legacy_seresnet18"),
    _convolution("sknet", "skresnet18"),
    _convolution("starnet", "starnet_s1"),
    _convolution("tresnet", "tresnet_m"),
    _convolution("vovnet", "ese_vovnet19b_dw"),
    _convolution("xception", "xception41"),
    ZooModel("inception_v4", _made("inception_v4"), classify, images(299), 4, TIMM, CONVOLUTION),
    _attention("beit", "beit_base_patch16_224", options={"depth": 4, "embed_dim": 192, "num_heads": 3}),
    _attention("cait", "cait_xxs24_224"),
    _attention("convit", "convit_tiny"),
    _attention("crossvit", "crossvit_9_240", 240, sized=False),
    ZooModel("timm_deit", _made("deit_tiny_distilled_patch16_224", img_size=64), _distilled, images(64), 4, TIMM,
        ATTENTION),
    _attention("deit3", "deit3_small_patch16_224"),
    _attention("eva02", "eva02_tiny_patch14_224", 56),
    _attention("gcvit", "gcvit_xxtiny"),
    _attention("gmlp", "gmlp_s16_224"),
    _attention("hiera", "hiera_tiny_224"),
    _attention("mixer", "mixer_s32_224"),
    _attention("mvit_v2", "mvitv2_tiny"),
    _attention("nest", "nest_tiny"),
    _attention("pit", "pit_ti_224"),
    _attention("pvt_v2", "pvt_v2_b0", sized=False),
    _attention("resmlp", "resmlp_12_224"),
    _attention("sequencer", "sequencer2d_s", 28),  # every step of its LSTMs is unrolled
    _attention("swin", "swin_tiny_patch4_window7_224"),
    _attention("swin_v2_cr", "swinv2_cr_tiny_ns_224"),
    _attention("tnt", "tnt_s_patch16_224"),
    _attention("twins", "twins_svt_small"),
    _attention("vit", "vit_tiny_patch16_224", random=True, options={"drop_rate": 0.1, "attn_drop_rate": 0.1}),
    _attention("vit_relpos", "vit_relpos_small_patch16_224"),
    _attention("volo", "volo_d1_224"),
    _attention("xcit", "xcit_nano_12_p16_224"),
    _hybrid("botnet", "botnet26t_256"),
    _hybrid("caformer", "caformer_s18", sized=False),
    _hybrid("coat", "coat_lite_tiny"),
    _hybrid("coatnet", "coatnet_nano_rw_224"),
    _hybrid("csatv2", sized=False),
    _hybrid("davit", "davit_tiny", sized=False),
    _hybrid("edgenext", "edgenext_xx_small", sized=False),
    _hybrid("efficientformer_v2", "efficientformerv2_s0"),
    _hybrid("efficientvim", "efficientvim_m1", sized=False),
    _hybrid("efficientvit", "efficientvit_b0", sized=False),
    _hybrid("efficientvit_msra", "efficientvit_m0"),
    _hybrid("fastvit", "fastvit_t8", sized=False),
    _hybrid("focalnet", "focalnet_tiny_srf", sized=False),
    _hybrid("iformer", "iformer_t", sized=False),
    _hybrid("lambdanet", "lambda_resnet26t"),
    _hybrid("levit", "levit_128s"),
    _hybrid("lowformer", "lowformer_b0", sized=False),
    _hybrid("maxvit", "maxvit_rmlp_pico_rw_256"),
    _hybrid("mobilevit", "mobilevit_xxs"),
    _hybrid("mobilevit_v2", "mobilevitv2_050"),
    _hybrid("nextvit", "nextvit_small", sized=False),
    _hybrid("poolformer", "poolformer_s12", sized=False),
    _hybrid("shvit", "shvit_s1", sized=False),
    _hybrid("swiftformer", "swiftformer_xs"),
    _hybrid("tiny_vit", "tiny_vit_5m_224", sized=False),
    _hybrid("visformer", "visformer_tiny"),
    _hybrid("vit_resnet", "vit_tiny_r_s16_p8_224"),
    _hybrid("vitamin", "vitamin_small_224"),
)  # fmt: skip
