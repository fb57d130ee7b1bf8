"""Encoders and decoders of transformers, most with one embedding for both; padded texts in, and the same texts out.

Where the library's default drops whole layers at random (layerdrop, an `if` on a random number, which no graph can
hold), it is set to 0.
"""

from __future__ import annotations

from typing import Any

from families.entry import VOCABULARY, ZooModel
from families.huggingface import SMALL, padded_text, transformers_model

# The two ways in which the configurations call their sizes: BART's and T5's.
BART = {
    "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {
    "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0,
}  # fmt: skip
NO_LAYERDROP = {"encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0}


PICKED = "picks each expert's tokens with nonzero(), and has no other experts"


def _sequence(name: str, head: str, base: dict[str, Any], **options: Any) -> ZooModel:
    batch = options.pop("batch", padded_text)
    return transformers_model(name, head, "sequence to sequence", batch, base=base, **options)


def _shifted(size: int) -> Any:
    """Padded texts with what the decoder reads; ProphetNet asserts its values where it must make that itself."""
    batch = padded_text(size)
    return batch | {"decoder_input_ids": batch["input_ids"].roll(1, -1)}


def _two_berts() -> Any:
    from transformers import BertConfig, EncoderDecoderConfig

    sizes: dict[str, Any] = SMALL | {"num_hidden_layers": 2}
    decoder = BertConfig(**sizes, is_decoder=True, add_cross_attention=True)
    config = EncoderDecoderConfig(encoder=BertConfig(**sizes).to_dict(), decoder=decoder.to_dict())
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return config


def _t5gemma() -> Any:
    from transformers import T5GemmaConfig, T5GemmaModuleConfig

    sizes: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 16}
    return T5GemmaConfig(
        encoder=T5GemmaModuleConfig(**sizes), decoder=T5GemmaModuleConfig(**sizes), vocab_size=VOCABULARY
    )


MODELS = (
    _sequence("bart", "BartForConditionalGeneration", BART, random=True),
    _sequence("bigbird_pegasus", "BigBirdPegasusForConditionalGeneration", BART, block_size=2, num_random_blocks=1),
    _sequence("blenderbot", "BlenderbotForConditionalGeneration", BART),
    _sequence("blenderbot_small", "BlenderbotSmallForConditionalGeneration", BART),
    _sequence("encoder_decoder", "EncoderDecoderModel", {}, config=_two_berts),
    _sequence("fsmt", "FSMTForConditionalGeneration", BART, src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY,
        langs=["en", "de"],
        refused=(r"modeling_fsmt.*padding_mask.any\(\)", "leaves its mask out where a batch has no padding")),
    _sequence("led", "LEDForConditionalGeneration", BART, attention_window=8, max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
        refused=(r"modeling_led.*\.item\(\)", "asks with .item() whether any token has global attention")),
    _sequence("longt5", "LongT5ForConditionalGeneration", T5, local_radius=4),
    _sequence("longt5_transient_global", "LongT5ForConditionalGeneration", T5, local_radius=4,
        encoder_attention_type="transient-global", global_block_size=4),
    _sequence("m2m_100", "M2M100ForConditionalGeneration", BART, **NO_LAYERDROP),
    _sequence("marian", "MarianMTModel", BART),
    _sequence("mbart", "MBartForConditionalGeneration", BART),
    _sequence("mt5", "MT5ForConditionalGeneration", T5),
    _sequence("mvp", "MvpForConditionalGeneration", BART),
    _sequence("nllb_moe", "NllbMoeForConditionalGeneration", BART, num_experts=4, encoder_sparse_step=2,
        decoder_sparse_step=2, expert_capacity=16, **NO_LAYERDROP, refused=(r"modeling_nllb_moe.*nonzero", PICKED)),
    _sequence("pegasus", "PegasusForConditionalGeneration", BART),
    _sequence("pegasus_x", "PegasusXForConditionalGeneration", BART, block_size=8, num_global_tokens=4),
    _sequence("plbart", "PLBartForConditionalGeneration", BART),
    _sequence("prophetnet", "ProphetNetForConditionalGeneration", SMALL, batch=_shifted, num_hidden_layers=None,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_encoder_layers=2, num_decoder_layers=2,
        num_encoder_attention_heads=4, num_decoder_attention_heads=4, decoder_start_token_id=1),
    _sequence("switch_transformers", "SwitchTransformersForConditionalGeneration", T5, num_experts=4,
        num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
        refused=(r"modeling_switch_transformers.*nonzero", PICKED)),
    _sequence("t5", "T5ForConditionalGeneration", T5, random=True),
    _sequence("t5_gated", "T5ForConditionalGeneration", T5, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    _sequence("t5gemma", "T5GemmaForConditionalGeneration", {}, config=_t5gemma),
    _sequence("umt5", "UMT5ForConditionalGeneration", T5),
)  # fmt: skip
