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
    "Mixtral": decoder(lambda: tf.MixtralForCausalLM(tf.MixtralConfig(**DECODER, **EXPERTS))),
    "GPT-2": decoder(lambda: tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=32, **IDS))),
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
    "Llava": Architecture(llava, text_with_images, next_tokens),
    "Llama with LoRA": decoder(with_adapters),
}  # fmt: skip
