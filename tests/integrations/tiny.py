"""A small Llama and rows with unequal numbers of labels, for tests of trainers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import pipework

CHUNKS = 4
LAYERS = 2
TOKENS = 7


def llama() -> Any:
    """The same at each call."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Every fourth one has all labels, others lack up to three."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(count):
        ids = torch.randint(3, 37, (TOKENS,), generator=generator)
        labels = ids.clone()
        labels[TOKENS - number % 4 :] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def batch(count: int) -> dict[str, Tensor]:
    """Rows in one mini-batch."""
    return {name: torch.stack([row[name] for row in rows(count)]) for name in ("input_ids", "labels")}


def pipe_of(model: nn.Module, mesh: pipework.Mesh | None = None, **options: Any) -> pipework.Pipe:
    """A pipe of two workers, attached to the model."""
    devices = None if mesh is not None else ["cpu", "cpu"]
    options = {"chunks": CHUNKS, "balance": [2, 3], "devices": devices, "mesh": mesh, **options}
    return pipework.attach(model, batch(2), **options)


def with_pipe(model: nn.Module, **options: Any) -> nn.Module:
    """The model, with a pipe attached."""
    pipe_of(model, **options)
    return model


def loader(count: int) -> Any:
    """Mini-batches of four rows, in order."""
    return torch.utils.data.DataLoader(rows(count), batch_size=4)  # type: ignore[arg-type]


def trained_by_hand(epochs: int) -> tuple[list[float], nn.Module]:
    """The losses of a pipe with nine rows, two mini-batches for each step of the optimizer, and what was trained."""
    model, losses = with_pipe(llama()).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for number, each in enumerate(loader(9)):
            loss = model(**each).loss
            (loss / 2).backward()
            losses.append(loss.item())
            if number > 0:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
    return losses, model
