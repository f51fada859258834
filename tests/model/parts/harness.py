"""A model with a pipe attached, compared with the same model run micro-batch by micro-batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from pipework import NoChunk, Pipe, attach
from pipework.model.parts.sample import LossPlace
from pipework.torch_private import pytree


def loss_in(result: Any) -> Tensor:
    place = LossPlace.in_result(result)
    assert place is not None
    return place.read(result)


def micro_batches(batch: dict[str, Any], chunks: int) -> list[dict[str, Any]]:
    def piece(value: Any, number: int) -> Any:
        if isinstance(value, NoChunk):
            return value.tensor
        return value.tensor_split(chunks)[number] if isinstance(value, Tensor) else value

    # Not each piece: where memory begins decides how some kernels add.
    batch = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)
    return [pytree.tree_map(lambda leaf, n=n: piece(leaf, n), batch) for n in range(chunks)]


def plain_step(
    model: nn.Module, batch: dict[str, Any], chunks: int, weight: Callable[[Any], float] = len, target: str = "labels"
) -> Tensor:
    """The loss of a mini-batch, and gradients in the model, computed micro-batch by micro-batch."""
    pieces = micro_batches(batch, chunks)
    weights = [float(weight(piece[target])) for piece in pieces]
    before = [parameter.grad for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = None
    losses = []
    for piece, own in zip(pieces, weights, strict=True):
        loss = loss_in(model(**piece)) * (own / sum(weights))
        loss.backward()
        losses.append(loss.detach())
    for parameter, earlier in zip(model.parameters(), before, strict=True):
        if earlier is not None:
            parameter.grad = earlier if parameter.grad is None else earlier + parameter.grad
    total = losses[0]
    for loss in losses[1:]:
        total = total + loss
    return total


def assert_same(actual: nn.Module, expected: nn.Module, but: Iterable[str] = ()) -> None:
    """Gradients, parameters and buffers are bitwise equal; those of `but`, used by several stages, nearly."""
    pairs = [
        *((name, "grad", each.grad) for name, each in expected.named_parameters()),
        *((name, "", each) for name, each in expected.state_dict().items()),
    ]
    got = {
        **{(name, "grad"): each.grad for name, each in actual.named_parameters()},
        **{(name, ""): each for name, each in actual.state_dict().items()},
    }
    assert got.keys() == {(name, kind) for name, kind, _ in pairs}
    for name, kind, value in pairs:
        own = got[name, kind]
        assert (own is None) == (value is None), f"{kind} of {name}"
        if value is not None and name in but:
            torch.testing.assert_close(own, value)
        elif value is not None:
            assert torch.equal(own, value), f"{kind} of {name} differs by {(own - value).abs().max()}"


def attached(model: nn.Module, batch: dict[str, Any], **options: Any) -> Pipe:
    """A pipe for a model on the CPU, that is attached with the first rows of a mini-batch."""
    sample = pytree.tree_map(lambda leaf: leaf[:7].clone() if isinstance(leaf, Tensor) else leaf, batch)
    options = {"chunks": 2, "devices": ["cpu", "cpu"], **options}
    return attach(model, sample, **options)


def assert_exact(
    model: nn.Module,
    batch: dict[str, Any],
    *,
    but: Iterable[str] = (),
    steps: int = 2,
    weight: Callable[[Any], float] = len,
    **options: Any,
) -> Pipe:
    """Trains the model with a pipe and without; returns the pipe.

    Args:
        model: is copied.
        batch: of every step.
        but: see `assert_same`.
        steps: how many.
        weight: of a micro-batch's labels.
        options: of `attach`.
    """
    plain, own = copy.deepcopy(model), copy.deepcopy(model)
    pipe = attached(own, batch, **options)
    assert_same(own, plain)  # attaching changes nothing
    optimizers = [torch.optim.SGD(each.parameters(), 0.05) for each in (plain, own)]
    for _ in range(steps):
        expected = plain_step(plain, batch, pipe.chunks, weight)
        loss = loss_in(own(**pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, batch)))
        assert torch.equal(loss.detach(), expected), (loss, expected)
        loss.backward()
        assert_same(own, plain, but)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return pipe
