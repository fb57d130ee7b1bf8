"""State-space and linear-recurrent models of transformers, alone and with attention, in the library's own PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from families.entry import LENGTH, VOCABULARY, ZooModel, text
from families.huggingface import transformers_model

GROUPED = {"num_key_value_heads": 2}
NARROW = {"head_dim": 16, **GROUPED}
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8, "mamba_n_groups": 1,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip


def _state(name: str, head: str, **options: Any) -> ZooModel:
    return transformers_model(name, head, "state space and recurrent", options.pop("batch", text), **options)


def _short_text(size: int) -> Any:
    """Half of `text`: capture unrolls every step of a recurrence."""
    ids = torch.randint(0, VOCABULARY, (size, LENGTH // 2))
    return {"input_ids": ids, "labels": ids.clone()}


MODELS = (
    _state("bamba", "BambaForCausalLM", attn_layer_indices=[1, 3], **GROUPED, **MAMBA2),
    _state("falcon_h1", "FalconH1ForCausalLM", mamba_d_ssm=128, **NARROW, **MAMBA2),
    _state("falcon_mamba", "FalconMambaForCausalLM", state_size=8),
    _state("granitemoehybrid", "GraniteMoeHybridForCausalLM", num_local_experts=4, num_experts_per_tok=2,
        shared_intermediate_size=64, layer_types=["mamba", "attention", "mamba", "attention"], **GROUPED, **MAMBA2),
    _state("jamba", "JambaForCausalLM", num_experts=4, mamba_d_state=8, attn_layer_period=2, attn_layer_offset=1,
        expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, **GROUPED),
    _state("lfm2", "Lfm2ForCausalLM", layer_types=["conv", "full_attention"] * 2, **GROUPED),
    _state("mamba", "MambaForCausalLM", state_size=8),
    _state("mamba2", "Mamba2ForCausalLM", state_size=8, num_heads=8, head_dim=16, chunk_size=8, n_groups=2),
    _state("nemotron_h", "NemotronHForCausalLM", mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=8, chunk_size=8,
        n_groups=1, hybrid_override_pattern="M*M-", **NARROW),
    _state("olmo_hybrid", "OlmoHybridForCausalLM", **GROUPED, **DELTA),
    _state("qwen3_5", "Qwen3_5ForCausalLM", **NARROW, **DELTA),
    _state("qwen3_next", "Qwen3NextForCausalLM", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, **NARROW, **DELTA),
    _state("recurrent_gemma", "RecurrentGemmaForCausalLM", num_key_value_heads=1, lru_width=64,
        attention_window_size=16, block_types=["recurrent", "recurrent", "attention"], batch=_short_text),
    _state("rwkv", "RwkvForCausalLM", attention_hidden_size=64, context_length=64, batch=_short_text),
    _state("zamba", "ZambaForCausalLM", num_hidden_layers=6, num_key_value_heads=4, mamba_d_state=8, n_mamba_heads=2,
        attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    _state("zamba2", "Zamba2ForCausalLM", num_key_value_heads=4, mamba_d_state=8, n_mamba_heads=8, mamba_headdim=16,
        chunk_size=8, use_mamba_kernels=False, layers_block_type=["mamba", "hybrid"] * 2, num_mem_blocks=1,
        adapter_rank=8, use_mem_rope=True),
)  # fmt: skip
