"""Trains a model of vision and language, a tiny Qwen2-VL, in a pipe of two workers: seconds on a CPU.

Rows have up to two images of several sizes, which lie one behind the other: each micro-batch gets those of its rows.
Needs: pip install ".[hf]"  # from a checkout
"""

import argparse

import torch
from torch import Tensor
from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

import pipework

IMAGE = 90  # the placeholder
parser = argparse.ArgumentParser(description="Trains a model of vision and language in a pipe.")
parser.add_argument("--steps", type=int, default=8, help="(%(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def draw_batch(rows: int) -> dict[str, Tensor]:
    """What AutoProcessor returns for texts with images: `processor(text=..., images=..., return_tensors="pt")`."""
    ids, grids = torch.arange(rows)[:, None] % 4 * 7 + torch.arange(24), []
    for row in range(rows):
        for start in (2, 10)[: row % 3]:
            grids.append([1, 4, 2 * (1 + row % 3)])  # times, rows, columns of patches; 2 by 2 have one placeholder
            ids[row, start : start + 2 * (1 + row % 3)] = IMAGE
    patches = torch.randn(sum(height * width for _, height, width in grids), 3 * 2 * 4 * 4)
    return {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int(),
        "labels": ids.masked_fill(ids == IMAGE, -100), "pixel_values": patches, "image_grid_thw": torch.tensor(grids),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    text = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    config = Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=IMAGE)
    model = Qwen2VLForConditionalGeneration(config)  # real weights: from_pretrained(folder, dtype=torch.bfloat16)
    devices = ["cpu", "cpu"]  # None: all GPUs. One process for each GPU: torchrun, and mesh=pipework.init() instead.
    batch = draw_batch(32)
    pipework.attach(model, draw_batch(4), chunks=8, devices=devices)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        loss = model(**batch).loss  # runs the whole schedule
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
