"""Models of speech and sound of transformers, on waveforms and spectrograms.

Where the library's default masks spans of the input with numpy's random numbers (mask_time_prob) or drops whole layers
at random (layerdrop, an `if` on a random number), which no graph can hold, it is set to 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from families.entry import CLASSES, VOCABULARY, ZooModel
from families.huggingface import SMALL, classes, transformers_model
from families.sequence_models import BART, NO_LAYERDROP

WORDS = 8  # of a transcript

# wav2vec 2.0 and its kin: three convolutions over the waveform, then an encoder.
SPEECH = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "conv_dim": [16, 16, 16], "conv_kernel": [10, 5, 5], "conv_stride": [5, 4, 4], "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 32, "vocab_size": 30,
    "num_labels": CLASSES, "pad_token_id": 0, "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def _audio(name: str, head: str, batch: Callable[[int], Any], base: dict[str, Any], **options: Any) -> ZooModel:
    return transformers_model(name, head, "audio", batch, base=base, **options)


def _speech(name: str, head: str, **options: Any) -> ZooModel:
    """Classifies a waveform."""
    return _audio(name, head, classes("input_values", 1600), SPEECH, **options)


def _transcribed(key: str, *shape: int) -> Callable[[int], Any]:
    """Random sound with the words that were said."""
    return lambda size: {
        key: torch.randn(size, *shape),
        "labels": torch.randint(3, VOCABULARY, (size, WORDS)),
    }


def _letters(size: int) -> Any:
    return {"input_values": torch.randn(size, 1600), "labels": torch.randint(1, 30, (size, 4))}


def _clap_loss(model: nn.Module, batch: Any) -> Tensor:
    """The embeddings' distance from random ones."""
    sound, target = batch
    return (model(sound).audio_embeds - target).square().mean()


def _rebuilt(model: nn.Module, batch: Tensor) -> Tensor:
    """The distance of decoded sound from the original, with what quantizing cost."""
    made = model(batch)
    return (made.audio_values - batch.squeeze(1)[..., : made.audio_values.shape[-1]]).square().mean() + made.loss.mean()


MODELS = (
    _audio("ast", "ASTForAudioClassification", classes("input_values", 32, 16), SMALL, num_labels=CLASSES,
        max_length=32, num_mel_bins=16, patch_size=8, frequency_stride=8, time_stride=8),
    _audio("clap_audio", "ClapAudioModelWithProjection",
        lambda size: (torch.randn(size, 1, 64, 16), torch.randn(size, 16)), {}, loss=_clap_loss, patch_size=4,
        num_mel_bins=16, spec_size=32, depths=[2, 2], num_attention_heads=[2, 2], window_size=4,
        patch_embeds_hidden_size=16, hidden_size=32, projection_dim=16),
    _audio("dac", "DacModel", lambda size: torch.randn(size, 1, 64), {}, loss=_rebuilt, encoder_hidden_size=8,
        downsampling_ratios=[2, 2], upsampling_ratios=[2, 2], decoder_hidden_size=16, n_codebooks=2, codebook_size=16,
        codebook_dim=4),
    _speech("data2vec_audio", "Data2VecAudioForSequenceClassification"),
    _speech("hubert", "HubertForSequenceClassification", random=True),
    _audio("moonshine", "MoonshineForConditionalGeneration", _transcribed("input_values", 4000), {},
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=2, encoder_num_attention_heads=4, decoder_num_attention_heads=4, pad_token_id=0),
    _speech("sew", "SEWForSequenceClassification", squeeze_factor=1),
    _speech("sew_d", "SEWDForSequenceClassification", squeeze_factor=1),
    _audio("speech_to_text", "Speech2TextForConditionalGeneration", _transcribed("input_features", 32, 16), BART,
        input_feat_per_channel=16, input_channels=1, conv_channels=32, max_source_positions=64,
        max_target_positions=32),
    _audio("speecht5", "SpeechT5ForSpeechToText", _transcribed("input_values", 1600), SPEECH, vocab_size=VOCABULARY,
        encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=128,
        decoder_ffn_dim=128, **NO_LAYERDROP),
    _speech("unispeech", "UniSpeechForSequenceClassification"),
    _speech("unispeech_sat", "UniSpeechSatForSequenceClassification"),
    _speech("wav2vec2", "Wav2Vec2ForSequenceClassification", random=True),
    _audio("wav2vec2_bert", "Wav2Vec2BertForSequenceClassification", classes("input_features", 20, 16), SPEECH,
        feature_projection_input_dim=16),
    _speech("wav2vec2_conformer", "Wav2Vec2ConformerForSequenceClassification"),
    _audio("wav2vec2_ctc", "Wav2Vec2ForCTC", _letters, SPEECH,
        refused=(r"modeling_wav2vec2.*labels.max\(\)", "its loss tests the labels' values before it uses them")),
    _speech("wavlm", "WavLMForSequenceClassification"),
    _audio("whisper", "WhisperForConditionalGeneration", _transcribed("input_features", 16, 40), BART, num_mel_bins=16,
        max_source_positions=20, max_target_positions=32),
)  # fmt: skip
