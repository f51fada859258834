"""A pipe whose workers are processes computes what one whose workers are threads does, to the last bit."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipework import Mesh, MicroBatches
from tests.distributed.together.alike import both, other_gradients
from tests.jobs import runs_on


def model() -> nn.Sequential:
    layers = [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2))]
    return nn.Sequential(*layers, nn.Linear(16, 4))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zb-v"])
@runs_on()
def test_training_in_processes_is_training_in_threads(mesh: Mesh, schedule: str) -> list[float]:
    pipes = pipe, threads = both(model(), mesh, schedule=schedule, loss_fn=functional.cross_entropy)
    assert len(list(pipe.parameters())) < len(list(threads.parameters())) or len(mesh.ranks) == 1
    optimizers = [torch.optim.AdamW(each.parameters()) for each in pipes]
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
        assert other_gradients(*pipes) == []
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    for each in pipes:
        each.eval()
    with torch.no_grad():
        assert torch.equal(pipe(x, outputs="all"), threads(x))
        assert (pipe(x) is not None) == pipe.is_last
        assert torch.equal(pipe(x, target=y), threads(x, target=y))
    return losses


@runs_on(2)
def test_a_loss_outside_is_computed_on_every_rank(mesh: Mesh) -> None:
    pipes = pipe, threads = both(model(), mesh)
    x, y = torch.randn(16, 16), torch.randint(0, 4, (16,))
    with pytest.raises(ValueError, match='outputs="all"'):
        pipe(x)
    for each, options in ((threads, {}), (pipe, {"outputs": "all"})):
        torch.manual_seed(1)
        functional.cross_entropy(each(x, **options), y).backward()
    assert other_gradients(*pipes) == []


def mean_of_squares(output: Tensor, target: Tensor) -> Tensor:
    return (output.flatten(0, -2).mean(1) - target.flatten()).square().mean()


@pytest.mark.parametrize("ranks", [2, 3])
@runs_on()
def test_micro_batches_that_one_rank_has_made(mesh: Mesh) -> list[float]:
    """The first rank alone has the inputs, and the last one the targets; shapes and numbers change."""
    plain = both(model(), mesh, schedule="1f1b", loss_fn=mean_of_squares)
    weighted = both(model(), mesh, schedule="1f1b", loss_fn=mean_of_squares, loss_weight=torch.numel)
    losses = []
    rows, packed = [(3,), (1,), (5,)], [(2, 3), (7,), (1, 1, 4)]
    for shapes, (here, there) in ((rows, plain), (packed, weighted), (packed[:2], weighted)):
        x, y = ([torch.randn(*shape, *more) for shape in shapes] for more in ((16,), ()))
        torch.manual_seed(1)
        expected = there(MicroBatches(x), target=MicroBatches(y))
        torch.manual_seed(1)
        inputs = MicroBatches(x) if here.is_first else None
        loss, outputs = here(inputs, target=MicroBatches(y) if here.is_last else None, return_output=True)
        assert torch.equal(loss, expected)
        assert (outputs is None) == (not here.is_last)
        for each in (loss, expected):
            each.backward()
        assert other_gradients(here, there) == []
        for each in (here, there):
            each.zero_grad()
        with torch.no_grad():
            outputs = here(inputs, outputs="all")
        assert [tuple(each.shape) for each in outputs] == [(*shape, 4) for shape in shapes]
        losses.append(loss.item())
    return losses
