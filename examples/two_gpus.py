"""What a Llama holds on each of two cards, by pipework's prediction on the meta device: docs/two_gpus.md has the table.

Usage: python examples/two_gpus.py 8B lora always
"""

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from pipework import Pipe

SHAPES = {  # blocks, width, width inside, heads, heads of keys, vocabulary
    "1B": (16, 2048, 8192, 32, 8, 128256),
    "3B": (28, 3072, 8192, 24, 8, 128256),
    "8B": (32, 4096, 14336, 32, 8, 128256),
    "13B": (40, 5120, 13824, 40, 40, 32000),
    "32B": (64, 5120, 25600, 64, 8, 151936),
}
OF_OPTIMIZER = {"fp32": 2, "master": 6, "bf16": 2, "lora": 2, "4bit": 2}  # times a parameter's bytes


def flash(module, query, key, value, mask, dropout=0.0, scaling=None, **_):
    """As on a GPU. On the meta device PyTorch would keep the scores of all pairs of tokens."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, dropout, True, scale=scaling)[0].transpose(1, 2), None


AttentionInterface.register("flash", flash)


class Block(nn.Module):
    def __init__(self, config, index, recomputes):
        super().__init__()
        self.layer = LlamaDecoderLayer(config, index)
        self.rotary = LlamaRotaryEmbedding(config)
        self.recomputes = recomputes

    def forward(self, x):
        positions = self.rotary(x, torch.arange(x.shape[1], device=x.device)[None])
        if self.recomputes:
            return checkpoint(self.layer, x, position_embeddings=positions, use_reentrant=False)
        return self.layer(x, position_embeddings=positions)


def llama(name, kind, recomputes):
    blocks, width, inside, heads, key_heads, words = SHAPES[name]
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=inside,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        attn_implementation="flash",
    )
    with torch.device("meta"):
        layers = [Block(config, index, recomputes) for index in range(blocks)]
        model = nn.Sequential(nn.Embedding(words, width), *layers, nn.Linear(width, words, bias=False))
        model.to(torch.float32 if kind == "fp32" else torch.bfloat16)
        if kind in ("lora", "4bit"):
            from peft import LoraConfig, inject_adapter_in_model

            of = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            inject_adapter_in_model(LoraConfig(r=16, target_modules=of), model.requires_grad_(False))
    return model


def loss_fn(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("name", choices=SHAPES)
parser.add_argument("kind", choices=OF_OPTIMIZER)
parser.add_argument("mode", choices=["never", "always", "interleaved", "blocks"])
name, kind, mode = vars(parser.parse_args()).values()
model = llama(name, kind, mode == "blocks")
stages = 4 if mode == "interleaved" else 2
half = SHAPES[name][0] // stages
pipe = Pipe(
    model,
    chunks=8,
    loss_fn=loss_fn,
    devices=["meta", "meta"],
    schedule="interleaved-1f1b" if mode == "interleaved" else "1f1b",
    checkpoint="always" if mode in ("always", "interleaved") else "never",
    balance=[half + 1, *[half] * (stages - 2), half + 1],
)
tokens = torch.zeros(8, 2048, dtype=torch.int64, device="meta")
prediction = pipe.predict(tokens, target=tokens, optimizer=OF_OPTIMIZER[kind], timeout=0)
print(prediction)
held = list(prediction.worker_bytes)
if kind == "4bit":  # NF4: 4 bits, and 4 bytes for each 64 numbers
    for stage, part in enumerate(pipe.partitions):
        linear = [each.base_layer.weight for each in part.modules() if hasattr(each, "base_layer")]
        held[stage % 2] -= sum(weight.nbytes - weight.numel() * (4 / 8 + 4 / 64) for weight in linear)
print(f"{name} {kind} {mode}:", *(f"{size / 2**30:.1f} GiB" for size in held))
