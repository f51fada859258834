"""Trains a denoiser of diffusers, a tiny Flux, by flow matching in a pipe of two workers: seconds on a CPU.

Needs: pip install . diffusers  # from a checkout
"""

import argparse

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor
from torch.nn.functional import mse_loss

import pipework
from pipework import NoChunk

parser = argparse.ArgumentParser(description="Trains a denoiser in a pipe.")
parser.add_argument("--steps", type=int, default=8, help="(%(default)s)")
parser.add_argument("--seed", type=int, default=0, help="(%(default)s)")


def draw_batch(model: FluxTransformer2DModel, rows: int) -> tuple[dict[str, Tensor | NoChunk], Tensor]:
    """Noisy latents, and what is to be predicted. Yours: packed latents of the VAE, outputs of the text encoders."""
    side, words = torch.arange(6.0), 7
    latents = torch.linspace(-1, 1, len(side) ** 2)[:, None] * torch.randn(rows, 1, model.config.in_channels)
    noise, time = torch.randn_like(latents), torch.rand(rows)
    inputs = {
        "hidden_states": latents.lerp(noise, time[:, None, None]), "timestep": time, "guidance": torch.ones(rows),
        "encoder_hidden_states": torch.zeros(rows, words, model.config.joint_attention_dim),
        "pooled_projections": torch.zeros(rows, model.config.pooled_projection_dim),
        "img_ids": NoChunk(torch.cartesian_prod(torch.zeros(1), side, side)),  # the same for all rows
        "txt_ids": NoChunk(torch.zeros(words, 3)),
    }  # fmt: skip
    return inputs, noise - latents


def main(argv: list[str] | None = None) -> None:
    options = parser.parse_args(argv)
    torch.manual_seed(options.seed)
    # Real weights: from_pretrained(folder, subfolder="transformer", torch_dtype=torch.bfloat16), and latents like it.
    model = FluxTransformer2DModel(
        in_channels=4, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, pooled_projection_dim=8, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    pipework.attach(
        model, draw_batch(model, rows=2)[0], loss_fn=lambda output, target: mse_loss(output.sample, target), chunks=8,
        devices=["cpu", "cpu"],  # None: all GPUs. One process for each GPU: torchrun, and mesh=pipework.init() instead.
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        inputs, target = draw_batch(model, rows=32)
        loss = model(**inputs, target=target)  # runs the whole schedule
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
