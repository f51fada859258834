"""A pipe whose workers are processes computes what one whose workers are threads does, to the last bit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework import Mesh, MicroBatches, Pipe

Run = Callable[..., list[Any]]


def model() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(*layers, nn.Linear(16, 4))


def train(mesh: Mesh, schedule: str) -> list[float]:
    module = model()
    threads = Pipe(
        copy.deepcopy(module),
        chunks=4,
        loss_fn=functional.cross_entropy,
        schedule=schedule,
        devices=["cpu"] * len(mesh.ranks),
    )
    pipe = Pipe(module, chunks=4, loss_fn=functional.cross_entropy, schedule=schedule, mesh=mesh)
    assert len(list(pipe.parameters())) < len(list(threads.parameters())) or len(mesh.ranks) == 1
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (pipe, threads)]
    losses = []
    for rows in (16, 16, 9, 3, 16):  # changing sizes, and fewer rows than chunks
        x, y = torch.randn(rows, 16), torch.randint(0, 4, (rows,))
        state = torch.get_rng_state()
        expected = threads(x, target=y)
        torch.set_rng_state(state)
        # Who has no use for inputs or targets need not have them.
        loss = pipe(x if pipe.is_first else None, target=y if pipe.is_last else None)
        assert torch.equal(loss, expected)
        for each in (loss, expected):
            each.backward()
        for name, parameter in pipe.named_parameters():
            assert torch.equal(parameter.grad, threads.get_parameter(name).grad), name
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    for each in (pipe, threads):
        each.eval()
    with torch.no_grad():
        expected = threads(x)
        assert torch.equal(pipe(x, outputs="all"), expected)
        output = pipe(x)
        assert (output is not None) == pipe.is_last
        evaluated = pipe(x, target=y)
        assert torch.equal(evaluated, threads(x, target=y))
    return losses


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
def test_training_in_processes_is_training_in_threads(on_ranks: Run, schedule: str, ranks: int) -> None:
    losses = on_ranks(ranks, train, schedule=schedule)
    assert losses == losses[:1] * ranks


def loss_outside(mesh: Mesh) -> None:
    module = model()
    threads = Pipe(copy.deepcopy(module), chunks=4, devices=["cpu", "cpu"])
    pipe = Pipe(module, chunks=4, mesh=mesh)
    x, y = torch.randn(16, 16), torch.randint(0, 4, (16,))
    with pytest.raises(ValueError, match='outputs="all"'):
        pipe(x)
    for each, options in ((threads, {}), (pipe, {"outputs": "all"})):
        torch.manual_seed(1)
        functional.cross_entropy(each(x, **options), y).backward()
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, threads.get_parameter(name).grad), name


def test_a_loss_outside_is_computed_on_every_rank(on_ranks: Run) -> None:
    on_ranks(2, loss_outside)


def mean_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output.flatten(0, -2).mean(1) - target.flatten()).square().mean()


def train_given(mesh: Mesh) -> list[float]:
    """The first rank alone has the inputs, and the last one the targets; shapes and numbers change."""
    module = model()
    options = {"schedule": "1f1b", "loss_fn": mean_of_squares}
    threads = Pipe(copy.deepcopy(module), 4, devices=["cpu"] * len(mesh.ranks), **options)
    pipe = Pipe(copy.deepcopy(module), 4, mesh=mesh, **options)
    weighted = [
        Pipe(each, 4, **place, **options, loss_weight=torch.numel)
        for each, place in ((copy.deepcopy(module), {"devices": ["cpu"] * len(mesh.ranks)}), (module, {"mesh": mesh}))
    ]
    losses = []
    rows, packed = [(3,), (1,), (5,)], [(2, 3), (7,), (1, 1, 4)]
    for shapes, (here, there) in ((rows, (pipe, threads)), (packed, weighted[::-1]), (packed[:2], weighted[::-1])):
        x, y = [torch.randn(*shape, 16) for shape in shapes], [torch.randn(shape) for shape in shapes]
        torch.manual_seed(1)
        expected = there(MicroBatches(x), target=MicroBatches(y))
        torch.manual_seed(1)
        loss, outputs = here(
            MicroBatches(x) if here.is_first else None,
            target=MicroBatches(y) if here.is_last else None,
            return_output=True,
        )
        assert torch.equal(loss, expected)
        assert (outputs is None) == (not here.is_last)
        for each in (loss, expected):
            each.backward()
        for name, parameter in here.named_parameters():
            assert torch.equal(parameter.grad, there.get_parameter(name).grad), name
        here.zero_grad()
        there.zero_grad()
        with torch.no_grad():
            outputs = here(MicroBatches(x) if here.is_first else None, outputs="all")
        assert [tuple(each.shape) for each in outputs] == [(*shape, 4) for shape in shapes]
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("ranks", [2, 3])
def test_micro_batches_that_one_rank_has_made(on_ranks: Run, ranks: int) -> None:
    losses = on_ranks(ranks, train_given)
    assert losses == losses[:1] * ranks
