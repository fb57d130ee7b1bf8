"""Encoders of transformers: most guess hidden words of padded texts."""

from __future__ import annotations

from typing import Any

import torch

from families.entry import LENGTH, VOCABULARY, ZooModel, gaps
from families.huggingface import padded_text, transformers_model

KIND = "masked"


def _masked(name: str, head: str, **options: Any) -> ZooModel:
    return transformers_model(name, head, KIND, options.pop("batch", gaps), **options)


def _unpadded(size: int) -> Any:
    """`gaps` in whole texts, without an attention mask."""
    ids = torch.randint(5, VOCABULARY, (size, LENGTH))
    hidden = torch.arange(LENGTH) % 3 == 1
    return {"input_ids": ids.masked_fill(hidden, 4), "labels": ids.masked_fill(~hidden, -100)}


def _labelled(size: int) -> Any:
    """Padded texts whose tokens are of two kinds."""
    return padded_text(size) | {"labels": torch.randint(0, 2, (size, LENGTH))}


def _labelled_unpadded(size: int) -> Any:
    return {
        "input_ids": torch.randint(3, VOCABULARY, (size, LENGTH)),
        "labels": torch.randint(0, 2, (size, LENGTH)),
    }


def _boxes(size: int) -> torch.Tensor:
    """Where each token stands on its page: left, top, right, bottom."""
    corner = torch.randint(0, 500, (size, LENGTH, 2))
    return torch.cat([corner, corner + torch.randint(1, 400, (size, LENGTH, 2))], -1)


def _page(size: int) -> Any:
    return gaps(size) | {"bbox": _boxes(size)}


def _labelled_page(size: int) -> Any:
    return _labelled(size) | {"bbox": _boxes(size)}


def _answers(size: int) -> Any:
    """Padded texts with the places at which an answer starts and ends."""
    batch = padded_text(size)
    del batch["labels"]
    ends = {name: torch.randint(0, LENGTH // 2, (size,)) for name in ("start_positions", "end_positions")}
    return batch | ends


LENGTHS_ARE_READ = "an assertion of the model reads the texts' lengths with .item()"

MODELS = (
    _masked("albert", "AlbertForMaskedLM", embedding_size=32),
    _masked("bert", "BertForMaskedLM", random=True),
    _masked("big_bird", "BigBirdForMaskedLM"),
    _masked("camembert", "CamembertForMaskedLM"),
    _masked("canine", "CanineForTokenClassification", batch=_labelled),
    _masked("convbert", "ConvBertForMaskedLM", embedding_size=64),
    _masked("data2vec_text", "Data2VecTextForMaskedLM"),
    _masked("deberta", "DebertaForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"], random=True),
    _masked("deberta_v2", "DebertaV2ForMaskedLM", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _masked("distilbert", "DistilBertForMaskedLM", dim=64, n_layers=4, n_heads=4, hidden_dim=128),
    _masked("electra", "ElectraForMaskedLM", embedding_size=64),
    _masked("electra_pretraining", "ElectraForPreTraining", embedding_size=64, batch=_labelled_unpadded),
    _masked("electra_pretraining_padded", "ElectraForPreTraining", embedding_size=64, batch=_labelled,
        refused=(r"modeling_electra.*\[active_loss\]",
        "its loss indexes the logits with the attention mask; unpadded texts (electra_pretraining) can be captured")),
    _masked("ernie", "ErnieForMaskedLM"),
    _masked("esm", "EsmForMaskedLM", mask_token_id=4, position_embedding_type="rotary"),
    _masked("eurobert", "EuroBertForMaskedLM", num_key_value_heads=2),
    _masked("flaubert", "FlaubertWithLMHeadModel", emb_dim=64, n_layers=4, n_heads=4,
        refused=(r"modeling_flaubert.*lengths.max\(\).item\(\)", LENGTHS_ARE_READ)),
    _masked("fnet", "FNetForMaskedLM", batch=_unpadded),
    _masked("funnel", "FunnelForMaskedLM", num_hidden_layers=None, block_sizes=[2, 2, 2], d_model=64, n_head=4,
        d_head=16, d_inner=128),
    _masked("ibert", "IBertForMaskedLM",
        refused=(r"quant_modules.*isnan", "asserts that the ranges of its activations hold no NaN, reading them")),
    _masked("layoutlm", "LayoutLMForMaskedLM", batch=_page),
    _masked("lilt", "LiltForTokenClassification", hidden_size=96, channel_shrink_ratio=4, batch=_labelled_page),
    _masked("longformer", "LongformerForMaskedLM", attention_window=8,
        refused=(r"modeling_longformer.*\.item\(\)", "asks with .item() whether any token has global attention")),
    _masked("luke", "LukeForMaskedLM", entity_vocab_size=20, entity_emb_size=32),
    _masked("megatron_bert", "MegatronBertForMaskedLM"),
    _masked("mobilebert", "MobileBertForMaskedLM", embedding_size=32, intra_bottleneck_size=32, true_hidden_size=32),
    _masked("modernbert", "ModernBertForMaskedLM"),
    _masked("mpnet", "MPNetForMaskedLM"),
    _masked("nomic_bert", "NomicBertForMaskedLM"),
    _masked("nystromformer", "NystromformerForMaskedLM", num_landmarks=LENGTH, segment_means_seq_len=LENGTH),
    _masked("perceiver", "PerceiverForMaskedLM", d_latents=64, d_model=64, num_latents=8, num_self_attends_per_block=4,
        num_blocks=1, num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=LENGTH),
    _masked("reformer", "ReformerForMaskedLM", is_decoder=False, attn_layers=["local", "lsh", "local", "lsh"],
        attention_head_size=16, feed_forward_size=128, axial_pos_shape=[4, 4], axial_pos_embds_dim=[32, 32],
        num_buckets=2, lsh_attn_chunk_length=4, local_attn_chunk_length=4, batch=_unpadded,
        refused=(r"modeling_reformer.*manual_seed", "seeds torch's generator in every layer")),
    _masked("rembert", "RemBertForMaskedLM", input_embedding_size=32, output_embedding_size=32),
    _masked("roberta", "RobertaForMaskedLM", random=True),
    _masked("roberta_prelayernorm", "RobertaPreLayerNormForMaskedLM"),
    _masked("roc_bert", "RoCBertForMaskedLM", enable_pronunciation=False, enable_shape=False),
    _masked("roformer", "RoFormerForMaskedLM", embedding_size=64),
    _masked("splinter", "SplinterForQuestionAnswering", batch=_answers),
    _masked("squeezebert", "SqueezeBertForMaskedLM", embedding_size=64),
    _masked("tapas", "TapasForMaskedLM"),
    _masked("xlm", "XLMWithLMHeadModel", emb_dim=64, n_layers=4, n_heads=4,
        refused=(r"modeling_xlm.*lengths.max\(\).item\(\)", LENGTHS_ARE_READ)),
    _masked("xlm_roberta", "XLMRobertaForMaskedLM"),
    _masked("xlm_roberta_xl", "XLMRobertaXLForMaskedLM"),
    _masked("xmod", "XmodForMaskedLM", languages=["en_XX"], default_language="en_XX",
        refused=(r"modeling_xmod.*\[lang_mask\]", "picks each language's samples with a boolean mask")),
    _masked("yoso", "YosoForMaskedLM"),
)  # fmt: skip
