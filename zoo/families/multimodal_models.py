"""Models of transformers over images and text: contrastive, captioning, answering, and language models that see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from families.entry import CLASSES, LENGTH, VOCABULARY, ZooModel, own_loss
from families.huggingface import transformers_model

IMAGE = 5  # the token that stands for a patch of an image
LARGE, SMALL = 32, 16  # pixels; patches have 8

TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
PATCHES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": LARGE,
    "patch_size": 8,
}  # fmt: skip
BOTH = {"text_config": TEXT, "vision_config": PATCHES}
DECODER = TEXT | {"num_key_value_heads": 2, "head_dim": 16}
CLIP = {"model_type": "clip_vision_model", **PATCHES, "image_size": SMALL}
SIGLIP = {"model_type": "siglip_vision_model", **PATCHES, "image_size": SMALL}
LLAMA = {"model_type": "llama", **DECODER}


def contrast(model: nn.Module, batch: Any) -> Tensor:
    """The model's own contrastive loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def _ids(size: int) -> Tensor:
    return torch.randint(IMAGE + 1, VOCABULARY, (size, LENGTH))


def _images(size: int, pixels: int = LARGE) -> Tensor:
    return torch.randn(size, 3, pixels, pixels)


def _pairs(size: int) -> Any:
    """A text and an image for each sample."""
    present = torch.ones(size, LENGTH, dtype=torch.long)
    return {"input_ids": _ids(size), "pixel_values": _images(size), "attention_mask": present}


def _captions(size: int) -> Any:
    ids = _ids(size)
    return {"input_ids": ids, "pixel_values": _images(size), "labels": ids.clone()}


def _answered(size: int) -> Any:
    return _pairs(size) | {"labels": torch.rand(size, CLASSES)}


def _matched(size: int) -> Any:
    return _pairs(size) | {"labels": torch.randint(0, 2, (size,))}


def _outlined(size: int) -> Any:
    return _pairs(size) | {"labels": torch.randint(0, 2, (size, LARGE, LARGE)).float()}


def _video(size: int) -> Any:
    return {"input_ids": _ids(size), "pixel_values": torch.randn(size, 4, 3, LARGE, LARGE)}


def _seen(pixels: int, *, frames: bool = False, types: bool = False) -> Callable[[int], Any]:
    """Texts with four tokens that stand for an image's patches."""

    def make(size: int) -> Any:
        ids = _ids(size)
        ids[:, 1:5] = IMAGE
        shape = (size, 1) if frames else (size,)
        batch = {
            "input_ids": ids,
            "pixel_values": torch.randn(*shape, 3, pixels, pixels),
            "labels": ids.masked_fill(ids == IMAGE, -100),
        }
        return batch | {"token_type_ids": (ids == IMAGE).long()} if types else batch

    return make


def _boxes(size: int) -> Tensor:
    corner = torch.randint(0, 500, (size, LENGTH, 2))
    return torch.cat([corner, corner + torch.randint(1, 400, (size, LENGTH, 2))], -1)


def _page(size: int) -> Any:
    labels = torch.randint(0, CLASSES, (size, LENGTH))
    return {"input_ids": _ids(size), "bbox": _boxes(size), "pixel_values": _images(size), "labels": labels}


def _with_features(size: int) -> Any:
    """Texts with four vectors that a detector has made of an image."""
    present = torch.ones(size, LENGTH, dtype=torch.long)
    batch = {"input_ids": _ids(size), "attention_mask": present, "visual_embeds": torch.randn(size, 4, 24)}
    return batch | {"labels": torch.rand(size, CLASSES)}


def _with_places(size: int) -> Any:
    """The same, with where in the image they lie."""
    batch = {"input_ids": _ids(size), "visual_feats": torch.randn(size, 4, 24), "visual_pos": torch.rand(size, 4, 4)}
    return batch | {"labels": torch.randint(0, CLASSES, (size,))}


def _patches(size: int) -> Any:
    """Flattened patches with their rows and columns, and the text to be read off them."""
    places = torch.randint(1, 8, (size, 9, 2)).float()
    flattened = torch.cat([places, torch.randn(size, 9, 48)], -1)
    labels = torch.randint(2, VOCABULARY, (size, 8))
    return {"flattened_patches": flattened, "attention_mask": torch.ones(size, 9), "labels": labels}


def _read(size: int) -> Any:
    return {"pixel_values": _images(size), "labels": torch.randint(3, VOCABULARY, (size, 8))}


def _spelled(size: int) -> Any:
    ids = _ids(size)
    return {"input_ids": ids, "labels": ids.clone()}


def _joined(model: nn.Module, batch: Any) -> Tensor:
    """FLAVA's base model has no loss: the mean square of what it makes of both inputs."""
    found: Tensor = model(**batch).multimodal_embeddings
    return found.square().mean()


def _both(
    name: str, head: str, batch: Callable[[int], Any], base: dict[str, Any] | None = None, **options: Any
) -> ZooModel:
    return transformers_model(name, head, "multimodal", batch, base=base or {}, **options)


def _contrastive(name: str, head: str, batch: Callable[[int], Any] = _pairs, **options: Any) -> ZooModel:
    return _both(name, head, batch, BOTH, loss=contrast, **options)


REAL_IMAGES = "drops padded images from its batch with a boolean mask"

MODELS = (
    _contrastive("align", "AlignModel",
        vision_config={"image_size": LARGE, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 32},
        projection_dim=80),
    _contrastive("altclip", "AltCLIPModel", text_config=TEXT | {"project_dim": 32}, projection_dim=16),
    _both("aya_vision", "AyaVisionForConditionalGeneration", _seen(LARGE), vision_config=SIGLIP | {"image_size": LARGE},
        text_config={"model_type": "cohere2", **DECODER}, image_token_index=IMAGE, alignment_intermediate_size=32),
    _both("blip", "BlipForConditionalGeneration", _captions, vision_config=PATCHES,
        text_config=TEXT | {"encoder_hidden_size": 32, "sep_token_id": 2}, projection_dim=16),
    _both("blip_2", "Blip2ForConditionalGeneration", _seen(LARGE), vision_config=PATCHES,
        qformer_config=TEXT | {"encoder_hidden_size": 32},
        text_config={"model_type": "opt", **TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, num_query_tokens=4,
        image_token_index=IMAGE),
    _both("bridgetower", "BridgeTowerForImageAndTextRetrieval", _matched, hidden_size=64, num_attention_heads=2,
        num_hidden_layers=2, vision_config=PATCHES | {"hidden_size": 64},
        text_config=TEXT | {"hidden_size": 64, "type_vocab_size": 1}),
    _contrastive("chinese_clip", "ChineseCLIPModel", projection_dim=16),
    _contrastive("clip", "CLIPModel", projection_dim=16),
    _both("clipseg", "CLIPSegForImageSegmentation", _outlined, BOTH, loss=own_loss, projection_dim=16,
        extract_layers=[0, 1], reduce_dim=16, decoder_num_attention_heads=2, decoder_intermediate_size=32),
    _both("flava", "FlavaModel", _pairs, loss=_joined, image_config=PATCHES, text_config=TEXT, multimodal_config=TEXT,
        hidden_size=32),
    _both("fuyu", "FuyuForCausalLM", _spelled, TEXT, text_config={"model_type": "persimmon", **TEXT}),
    _both("gemma3_vision", "Gemma3ForConditionalGeneration", _seen(SMALL, types=True), vision_config=SIGLIP,
        text_config={"model_type": "gemma3_text", **DECODER}, mm_tokens_per_image=4, image_token_index=IMAGE),
    _both("git", "GitForCausalLM", _captions, TEXT, vision_config=PATCHES),
    _contrastive("groupvit", "GroupViTModel",
        vision_config=PATCHES | {"depths": [2, 2, 2], "num_group_tokens": [4, 2, 0], "num_output_groups": [4, 2, 0]},
        projection_dim=16, projection_intermediate_dim=32),
    _both("idefics3", "Idefics3ForConditionalGeneration", _seen(LARGE, frames=True), vision_config=PATCHES,
        text_config=LLAMA, image_token_id=IMAGE, scale_factor=2,
        refused=(r"modeling_idefics3.*\[real_images_inds\]", REAL_IMAGES)),
    _both("internvl", "InternVLForConditionalGeneration", _seen(LARGE),
        vision_config=PATCHES | {"image_size": [LARGE, LARGE], "patch_size": [8, 8]},
        text_config={"model_type": "qwen2", **DECODER}, image_token_id=IMAGE),
    _both("layoutlmv3", "LayoutLMv3ForTokenClassification", _page, TEXT, num_hidden_layers=4, hidden_size=36,
        coordinate_size=6, shape_size=6, input_size=LARGE, patch_size=8, num_labels=CLASSES,
        max_2d_position_embeddings=1024),
    _both("llava", "LlavaForConditionalGeneration", _seen(SMALL), vision_config=CLIP, text_config=LLAMA,
        image_token_index=IMAGE),
    _both("lxmert", "LxmertForQuestionAnswering", _with_places, TEXT | {"num_hidden_layers": None}, l_layers=2,
        x_layers=2, r_layers=2, visual_feat_dim=24, num_qa_labels=CLASSES),
    _contrastive("metaclip_2", "MetaClip2Model", projection_dim=16),
    _contrastive("owlvit", "OwlViTModel", projection_dim=16),
    _both("paligemma", "PaliGemmaForConditionalGeneration", _seen(SMALL, types=True), vision_config=SIGLIP,
        text_config={"model_type": "gemma", **DECODER}, image_token_index=IMAGE, projection_dim=32),
    _both("pix2struct", "Pix2StructForConditionalGeneration", _patches, text_config={"vocab_size": VOCABULARY,
        "hidden_size": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0,
        "pad_token_id": 0}, vision_config={"hidden_size": 32, "patch_embed_hidden_size": 48, "d_ff": 64, "d_kv": 16,
        "num_hidden_layers": 2, "num_attention_heads": 2, "seq_len": 16}),
    _contrastive("siglip", "SiglipModel"),
    _both("smolvlm", "SmolVLMForConditionalGeneration", _seen(LARGE, frames=True), vision_config=PATCHES,
        text_config=LLAMA, image_token_id=IMAGE, scale_factor=2,
        refused=(r"modeling_smolvlm.*\[real_images_inds\]", REAL_IMAGES)),
    _both("vilt", "ViltForQuestionAnswering", _answered, PATCHES | TEXT, num_hidden_layers=4, num_labels=CLASSES,
        max_image_length=-1,
        refused=(r"modeling_vilt", "cuts each image's patches out by a size that it reads from the pixel mask")),
    _both("vipllava", "VipLlavaForConditionalGeneration", _seen(SMALL), vision_config=CLIP, text_config=LLAMA,
        image_token_index=IMAGE, vision_feature_layers=[-1, -2]),
    _both("vision_encoder_decoder", "VisionEncoderDecoderModel", _read, encoder={"model_type": "vit", **PATCHES},
        decoder={"model_type": "gpt2", **TEXT, "is_decoder": True, "add_cross_attention": True},
        decoder_start_token_id=1, pad_token_id=0),
    _contrastive("vision_text_dual_encoder", "VisionTextDualEncoderModel",
        vision_config={"model_type": "vit", **PATCHES}, text_config={"model_type": "bert", **TEXT}, projection_dim=16),
    _both("visual_bert", "VisualBertForQuestionAnswering", _with_features, TEXT, num_hidden_layers=4,
        visual_embedding_dim=24, num_labels=CLASSES),
    _contrastive("x_clip", "XCLIPModel", _video, vision_config=PATCHES | {"num_frames": 4, "mit_hidden_size": 32,
        "mit_intermediate_size": 64, "mit_num_hidden_layers": 1, "mit_num_attention_heads": 2}, projection_dim=32,
        prompt_layers=1, prompt_num_attention_heads=2),
)  # fmt: skip
