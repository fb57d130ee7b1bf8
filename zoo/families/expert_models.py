"""Mixtures of experts of transformers, on its default experts: grouped matrix products, no shape from data."""

from __future__ import annotations

from typing import Any

from families.entry import VOCABULARY, ZooModel, text
from families.huggingface import transformers_model

# What the configurations call the number of experts, and how many of them see a token.
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, **EXPERTS}
NARROW = {"head_dim": 16, **GROUPED}
CHOSEN_IN_GROUPS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT_ATTENTION = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 16, **EXPERTS, **CHOSEN_IN_GROUPS,
}  # fmt: skip


def _experts(name: str, head: str, **options: Any) -> ZooModel:
    return transformers_model(name, head, "mixture of experts", options.pop("batch", text), **options)


MODELS = (
    _experts("afmoe", "AfmoeForCausalLM", num_dense_layers=1, **NARROW),
    _experts("dbrx", "DbrxForCausalLM", d_model=64, n_heads=4, n_layers=4, max_seq_len=64,
        base={"vocab_size": VOCABULARY, "pad_token_id": 0},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
        refused=(r"modeling_dbrx.*nonzero", "picks each expert's tokens with nonzero(), and has no other experts")),
    _experts("deepseek_v2", "DeepseekV2ForCausalLM", **LATENT_ATTENTION),
    _experts("deepseek_v3", "DeepseekV3ForCausalLM", **LATENT_ATTENTION),
    _experts("dots1", "Dots1ForCausalLM", **GROUPED, **CHOSEN_IN_GROUPS),
    _experts("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", moe_num_experts=4, moe_k=2, moe_num_shared_experts=1,
        **GROUPED),
    _experts("flex_olmo", "FlexOlmoForCausalLM", **GROUPED),
    _experts("glm4_moe", "Glm4MoeForCausalLM", **NARROW, **CHOSEN_IN_GROUPS),
    _experts("gpt_oss", "GptOssForCausalLM", **NARROW),
    _experts("granitemoe", "GraniteMoeForCausalLM", **GROUPED),
    _experts("granitemoeshared", "GraniteMoeSharedForCausalLM", shared_intermediate_size=32, **GROUPED),
    _experts("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", moe_topk=2, **NARROW),
    _experts("jetmoe", "JetMoeForCausalLM", kv_channels=16, **GROUPED,
        refused=(r"modeling_jetmoe.*tolist", "splits its tokens among experts by sizes that it reads with tolist()")),
    _experts("lfm2_moe", "Lfm2MoeForCausalLM", num_dense_layers=1,
        layer_types=["conv", "full_attention", "conv", "full_attention"], **GROUPED),
    _experts("llama4", "Llama4ForCausalLM", intermediate_size_mlp=64, **NARROW | {"num_experts_per_tok": 1}),
    _experts("minimax", "MiniMaxForCausalLM", block_size=8, **NARROW),
    _experts("minimax_m2", "MiniMaxM2ForCausalLM", **NARROW),
    _experts("mixtral", "MixtralForCausalLM", **GROUPED),
    _experts("mixtral_balanced", "MixtralForCausalLM", output_router_logits=True, **GROUPED),
    _experts("olmoe", "OlmoeForCausalLM", **GROUPED),
    _experts("phimoe", "PhimoeForCausalLM", **GROUPED),
    _experts("qwen2_moe", "Qwen2MoeForCausalLM", shared_expert_intermediate_size=64, **GROUPED),
    _experts("qwen3_moe", "Qwen3MoeForCausalLM", **NARROW),
    _experts("solar_open", "SolarOpenForCausalLM", **NARROW, **CHOSEN_IN_GROUPS),
)  # fmt: skip
