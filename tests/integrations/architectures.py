"""Tiny models of named architectures, each with a mini-batch of eight rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

from tests.integrations.comparing import next_tokens, rows, tokens

IDS: dict[str, Any] = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
DECODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, **IDS,
}  # fmt: skip
ENCODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "vocab_size": 99,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text() -> dict[str, Tensor]:
    """Sequences of several lengths, and in one of them a prompt whose tokens do not count."""
    ids = torch.randint(3, 98, (8, 12), generator=seeded(1))
    mask = torch.ones_like(ids)
    for row in range(8):
        mask[row, 12 - row % 4 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, :5] = -100
    return {"input_ids": ids.masked_fill(mask == 0, 2), "attention_mask": mask, "labels": labels}


def classified_text() -> dict[str, Tensor]:
    return {**text(), "labels": torch.arange(8) % 3}


def answered_text() -> dict[str, Tensor]:
    labels = torch.randint(3, 98, (8, 7), generator=seeded(2))
    labels[::2, 5:] = -100
    return {**text(), "labels": labels}


def images(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, size, size, generator=seeded(3)), "labels": torch.arange(8) % 3}


def text_with_images() -> dict[str, Tensor]:
    batch = {**text(), "pixel_values": images(16)["pixel_values"]}
    batch["input_ids"][:, :4] = 98
    batch["labels"][:, :4] = -100
    return batch


def speech() -> dict[str, Tensor]:
    return {"input_features": torch.randn(8, 8, 40, generator=seeded(3)), "labels": answered_text()["labels"]}


def with_adapters() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.1, init_lora_weights=False
    )
    return peft.get_peft_model(tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER)), config)


def llava() -> nn.Module:
    vision = tf.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, image_size=16, patch_size=8
    )
    return tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            vision_config=vision, text_config=tf.LlamaConfig(**DECODER), image_token_id=98, vision_feature_layer=-2
        )
    )


@dataclass(frozen=True)
class Architecture:
    """A model, a mini-batch, and how much the loss of a micro-batch counts.

    Attributes:
        make: a new model.
        batch: its mini-batch.
        weight: from a micro-batch's labels.
        generates: whether it makes text.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    weight: Callable[[Tensor], Tensor]
    generates: bool = False


def decoder(make: Callable[[], nn.Module]) -> Architecture:
    return Architecture(make, text, next_tokens, generates=True)


ARCHITECTURES = {
    "Llama": decoder(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER))),
    "Llama, tied": decoder(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**DECODER, tie_word_embeddings=True))),
    "Qwen3": decoder(
        lambda: tf.Qwen3ForCausalLM(
            tf.Qwen3Config(**DECODER, head_dim=8, use_sliding_window=True, sliding_window=4, max_window_layers=2)
        )
    ),
    "Gemma3": decoder(
        lambda: tf.Gemma3ForCausalLM(
            tf.Gemma3TextConfig(
                **DECODER, head_dim=8, sliding_window=4, layer_types=["sliding_attention", "full_attention"] * 2
            )
        )
    ),
    "Mistral": decoder(lambda: tf.MistralForCausalLM(tf.MistralConfig(**DECODER, sliding_window=5))),
    "Mixtral": decoder(lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**DECODER, **EXPERTS))),
    "gpt-oss": decoder(
        lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**DECODER, **EXPERTS, head_dim=8, sliding_window=4))
    ),
    "DeepSeek-V3": decoder(
        lambda: tf.DeepseekV3ForCausalLM(
            tf.DeepseekV3Config(
                **{**DECODER, "num_key_value_heads": 4}, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
                topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
                qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
            )
        )
    ),
    "GPT-2": decoder(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=32, **IDS))),
    "Mamba": decoder(
        lambda: tf.MambaForCausalLM(tf.MambaConfig(hidden_size=32, num_hidden_layers=4, state_size=4, **IDS))
    ),
    "BERT": Architecture(
        lambda: tf.BertForSequenceClassification(tf.BertConfig(**ENCODER, num_labels=3)), classified_text, rows
    ),
    "ModernBERT": Architecture(
        lambda: tf.ModernBertForMaskedLM(tf.ModernBertConfig(**{**ENCODER, **IDS}, cls_token_id=0, sep_token_id=1)),
        text,
        tokens,
    ),
    "DeBERTa-v2": Architecture(
        lambda: tf.DebertaV2ForSequenceClassification(
            tf.DebertaV2Config(
                **ENCODER, num_labels=3, relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"],
                norm_rel_ebd="layer_norm",
            )
        ),
        classified_text,
        rows,
    ),
    "T5": Architecture(
        lambda: tf.T5ForConditionalGeneration(
            tf.T5Config(
                d_model=32, d_kv=16, d_ff=64, num_layers=3, num_heads=2, vocab_size=99, decoder_start_token_id=0
            )
        ),
        answered_text,
        tokens,
        generates=True,
    ),
    "BART": Architecture(
        lambda: tf.BartForConditionalGeneration(
            tf.BartConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=64, decoder_start_token_id=1,
                forced_eos_token_id=1, **IDS,
            )
        ),
        answered_text,
        tokens,
        generates=True,
    ),
    "Whisper": Architecture(
        lambda: tf.WhisperForConditionalGeneration(
            tf.WhisperConfig(
                d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
                encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=20,
                max_target_positions=20, decoder_start_token_id=0, dropout=0.1, **IDS,
            )
        ),
        speech,
        tokens,
    ),
    "ViT": Architecture(
        lambda: tf.ViTForImageClassification(
            tf.ViTConfig(
                hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=64, image_size=32,
                patch_size=8, num_labels=3, hidden_dropout_prob=0.1,
            )
        ),
        images,
        rows,
    ),
    "ConvNeXt": Architecture(
        lambda: tf.ConvNextForImageClassification(
            tf.ConvNextConfig(hidden_sizes=[8, 16], depths=[2, 2], num_stages=2, patch_size=2, num_labels=3)
        ),
        images,
        rows,
    ),
    "Llava": Architecture(llava, text_with_images, next_tokens),
    "Llama with LoRA": decoder(with_adapters),
}  # fmt: skip
