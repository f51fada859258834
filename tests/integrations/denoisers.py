"""Tiny models of diffusers, each with a mini-batch. They return no loss."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pipework import NoChunk
from tests.integrations.building import ROWS


@dataclass(frozen=True)
class Denoiser:
    """A class of diffusers.

    Attributes:
        config: its arguments.
        shapes: of one row of each tensor that its forward takes; of a timestep, a number below 1000, it is ().
        shared: shapes of tensors that all rows have in common.
        others: other arguments of its forward.
    """

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
_UNET: dict[str, Any] = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
_LATENTS, _TEXT = (4, 8, 8), (7, 32)
_TIMED: dict[str, tuple[int, ...]] = {"hidden_states": _LATENTS, "timestep": ()}
_UP, _DOWN = ("UpBlock2D", "AttnUpBlock2D"), ("DownBlock2D", "AttnDownBlock2D")

DENOISERS = {
    "UNet2DModel": Denoiser(
        {"in_channels": 4, "out_channels": 4, "down_block_types": _DOWN, "up_block_types": _UP, **_UNET},
        {"sample": _LATENTS, "timestep": ()},
    ),
    "UNet2DConditionModel": Denoiser(
        {
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 32,
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 4, **_UNET,
        },
        {"sample": _LATENTS, "timestep": (), "encoder_hidden_states": _TEXT},
    ),
    "DiTTransformer2DModel": Denoiser(
        {
            "in_channels": 4, "num_layers": 4, "sample_size": 8, "norm_num_groups": 4, "num_embeds_ada_norm": 1000,
            **_HEADS,
        },
        _TIMED, others={"class_labels": torch.arange(ROWS)},
    ),
    "PixArtTransformer2DModel": Denoiser(
        {
            "in_channels": 4, "out_channels": 8, "num_layers": 4, "sample_size": 8, "norm_num_groups": 4,
            "cross_attention_dim": 32, "caption_channels": 32, "use_additional_conditions": False, **_HEADS,
        },
        {**_TIMED, "encoder_hidden_states": _TEXT},
    ),
    "SD3Transformer2DModel": Denoiser(
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_layers": 4, "joint_attention_dim": 32,
            "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8, **_HEADS,
        },
        {**_TIMED, "encoder_hidden_states": _TEXT, "pooled_projections": (16,)},
    ),
    "FluxTransformer2DModel": Denoiser(
        {
            "in_channels": 4, "num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 32,
            "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8), **_HEADS,
        },
        {"hidden_states": (16, 4), "timestep": (), "encoder_hidden_states": _TEXT, "pooled_projections": (16,)},
        {"img_ids": (16, 3), "txt_ids": (7, 3)},
    ),
    "SanaTransformer2DModel": Denoiser(
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 4, "sample_size": 8, "caption_channels": 32,
            "num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32, **_HEADS,
        },
        {**_TIMED, "encoder_hidden_states": _TEXT},
    ),
    "AuraFlowTransformer2DModel": Denoiser(
        {
            "sample_size": 8, "in_channels": 4, "out_channels": 4, "num_mmdit_layers": 2, "num_single_dit_layers": 2,
            "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 64, **_HEADS,
        },
        {**_TIMED, "encoder_hidden_states": _TEXT},
    ),
    "WanTransformer3DModel": Denoiser(
        {"in_channels": 4, "out_channels": 4, "num_layers": 4, "text_dim": 32, "freq_dim": 32, "ffn_dim": 64, **_HEADS},
        {"hidden_states": (4, 3, 8, 8), "timestep": (), "encoder_hidden_states": _TEXT},
    ),
    "LTXVideoTransformer3DModel": Denoiser(
        {
            "in_channels": 4, "out_channels": 4, "num_layers": 4, "cross_attention_dim": 32, "caption_channels": 32,
            **_HEADS,
        },
        {"hidden_states": (12, 4), "timestep": (), "encoder_hidden_states": _TEXT},
        others={"encoder_attention_mask": torch.ones(ROWS, 7), "num_frames": 3, "height": 2, "width": 2},
    ),
    "AutoencoderKL": Denoiser(
        {
            "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
            "block_out_channels": (16, 32), "norm_num_groups": 4,
        },
        {"sample": (3, 16, 16)},
    ),
}  # fmt: skip


def built(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model and a mini-batch for it."""
    import diffusers

    given, generator = DENOISERS[name], torch.Generator().manual_seed(3)

    def drawn(shape: tuple[int, ...], rows: int = ROWS) -> Tensor:
        return torch.randn(rows, *shape, generator=generator) if shape else 100 * torch.arange(rows, 0, -1)

    torch.manual_seed(0)
    model = getattr(diffusers, name)(**given.config)
    for parameter in model.parameters():  # some models begin with weights of zero, and so return zeros
        if not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    batch: dict[str, Any] = {each: drawn(shape) for each, shape in given.shapes.items()} | given.others
    batch |= {each: NoChunk(drawn(shape[1:], shape[0])) for each, shape in given.shared.items()}
    return model.train(), batch
