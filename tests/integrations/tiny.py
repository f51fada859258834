"""A small Llama and rows with unequal numbers of labels, for tests of trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipework
from tests.integrations.comparing import next_tokens
from tests.model.parts.harness import micro_batches

CHUNKS = 4
LAYERS = 2
TOKENS = 7


def llama(**options: Any) -> Any:
    """The same at each call."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=2,
        **options,
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


class MicroBatched:
    """Mixed into `Trainer`: the model itself runs forward and backward for each micro-batch in turn."""

    def training_step(self: Any, model: nn.Module, inputs: dict[str, Tensor], num_items_in_batch: Any = None) -> Tensor:
        model.train()
        earlier = [(parameter, parameter.grad) for parameter in model.parameters()]
        for parameter, _ in earlier:
            parameter.grad = None
        parts = micro_batches(inputs, min(CHUNKS, len(inputs["labels"])))
        counts = [next_tokens(part["labels"]) for part in parts]
        all_counts = float(sum(counts))
        total = torch.zeros(())
        for part, count in zip(parts, counts, strict=True):
            items = float(num_items_in_batch) / all_counts * count
            loss = model(**part, num_items_in_batch=items, use_cache=False).loss * (float(count) / all_counts)
            loss.backward()
            total = total + loss.detach()
        for parameter, gradient in earlier:
            if gradient is not None:
                parameter.grad = gradient + parameter.grad
        return total


def same_values(one: Any, other: Any, tolerance: float = 0.0) -> None:
    """Compares nested dicts of tensors and other values."""
    if isinstance(one, Tensor):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same_values(one[key], other[key], tolerance)
    else:
        assert one == (pytest.approx(other, rel=tolerance) if isinstance(one, float) else other)
