"""Decoders of transformers that predict the next token; their key-value cache stands at its default, on."""

from __future__ import annotations

from typing import Any

from families.entry import ZooModel, text
from families.huggingface import padded_text, transformers_model

GROUPED = {"num_key_value_heads": 2}  # for four heads of queries
NARROW = {"head_dim": 16, **GROUPED}  # where the library's own heads are wider than the model


def _causal(name: str, head: str, **options: Any) -> ZooModel:
    return transformers_model(name, head, "causal", options.pop("batch", text), **options)


MODELS = (
    _causal("apertus", "ApertusForCausalLM", **GROUPED),
    _causal("arcee", "ArceeForCausalLM", **GROUPED),
    _causal("bert_generation", "BertGenerationDecoder", is_decoder=True),
    _causal("biogpt", "BioGptForCausalLM"),
    _causal("bitnet", "BitNetForCausalLM", **GROUPED),
    _causal("bloom", "BloomForCausalLM"),
    _causal("codegen", "CodeGenForCausalLM", rotary_dim=8),
    _causal("cohere", "CohereForCausalLM", **GROUPED),
    _causal("cohere2", "Cohere2ForCausalLM", **GROUPED),
    _causal("ctrl", "CTRLLMHeadModel", dff=128),
    _causal("diffllama", "DiffLlamaForCausalLM", **GROUPED),
    _causal("ernie4_5", "Ernie4_5ForCausalLM", **NARROW),
    _causal("exaone4", "Exaone4ForCausalLM", **GROUPED),
    _causal("falcon", "FalconForCausalLM"),
    _causal("gemma", "GemmaForCausalLM", **NARROW),
    _causal("gemma2", "Gemma2ForCausalLM", **NARROW),
    _causal("gemma3", "Gemma3ForCausalLM", **NARROW),
    _causal("glm", "GlmForCausalLM", **NARROW),
    _causal("glm4", "Glm4ForCausalLM", **NARROW),
    _causal("gpt2", "GPT2LMHeadModel", random=True),
    _causal("gpt_bigcode", "GPTBigCodeForCausalLM"),
    _causal("gpt_neo", "GPTNeoForCausalLM", attention_types=[[["global", "local"], 2]]),
    _causal("gpt_neox", "GPTNeoXForCausalLM"),
    _causal("gptj", "GPTJForCausalLM", rotary_dim=8),
    _causal("granite", "GraniteForCausalLM", **GROUPED),
    _causal("helium", "HeliumForCausalLM", **NARROW),
    _causal("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", **NARROW),
    _causal("llama", "LlamaForCausalLM", **GROUPED),
    _causal("llama_padded", "LlamaForCausalLM", batch=padded_text, **GROUPED),
    _causal("ministral", "MinistralForCausalLM", **NARROW),
    _causal("mistral", "MistralForCausalLM", **GROUPED),
    _causal("modernbert_decoder", "ModernBertDecoderForCausalLM"),
    _causal("mpt", "MptForCausalLM"),
    _causal("nanochat", "NanoChatForCausalLM", **GROUPED),
    _causal("nemotron", "NemotronForCausalLM", **GROUPED),
    _causal("olmo", "OlmoForCausalLM", **GROUPED),
    _causal("olmo2", "Olmo2ForCausalLM", **GROUPED),
    _causal("openai_gpt", "OpenAIGPTLMHeadModel", random=True),
    _causal("opt", "OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64, random=True),
    _causal("persimmon", "PersimmonForCausalLM"),
    _causal("phi", "PhiForCausalLM"),
    _causal("phi3", "Phi3ForCausalLM", **GROUPED),
    _causal("qwen2", "Qwen2ForCausalLM", **GROUPED),
    _causal("qwen3", "Qwen3ForCausalLM", **NARROW),
    _causal("seed_oss", "SeedOssForCausalLM", **NARROW),
    _causal("smollm3", "SmolLM3ForCausalLM", **GROUPED),
    _causal("stablelm", "StableLmForCausalLM", **GROUPED),
    _causal("starcoder2", "Starcoder2ForCausalLM", **GROUPED),
    _causal("trocr", "TrOCRForCausalLM", decoder_layers=4, decoder_attention_heads=4, decoder_ffn_dim=128),
    _causal("vaultgemma", "VaultGemmaForCausalLM", **NARROW),
    _causal("xglm", "XGLMForCausalLM", num_layers=4, ffn_dim=128),
    _causal("xlnet", "XLNetLMHeadModel", max_position_embeddings=None, d_head=16, d_inner=128),
)
