"""What PyTorch's own pipelining of processes gets wrong without an error: here two ranks do what the plain model does.

All bodies run in one job, since starting processes takes seconds; what fails is named, and does not stop the others.
"""

import copy
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pipework import Mesh, Pipe
from pipework.testing import Reference, draw_key, reference_step

CHUNKS = 4
WIDTH = 8


def model() -> nn.Sequential:
    layers = [layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())]
    return nn.Sequential(*layers, nn.Dropout(0.3), nn.Linear(WIDTH, 2))


def batch(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, WIDTH), torch.randint(2, (rows,))


class Both:
    """The plain model and a pipe of a copy of it, of which this rank has a half."""

    def __init__(self, mesh: Mesh, plain: nn.Sequential, schedule: str = "1f1b", **options: Any) -> None:
        self.plain = plain
        self.pipe = Pipe(copy.deepcopy(plain), CHUNKS, schedule=schedule, loss_fn=F.cross_entropy, mesh=mesh, **options)

    def step(self, x: Tensor, y: Tensor) -> tuple[Tensor, Reference]:
        """Forward and backward of both, with the same random numbers."""
        state = torch.get_rng_state()
        reference = reference_step(self.plain, x, y, F.cross_entropy, CHUNKS, draw_key())
        torch.set_rng_state(state)
        loss = self.pipe(x, target=y)
        loss.backward()
        assert torch.equal(loss, reference.loss)
        return loss, reference

    def assert_equal_gradients(self) -> None:
        for name, parameter in self.pipe.named_parameters():
            assert torch.equal(parameter.grad, self.plain.get_parameter(name).grad), name

    def assert_equal_state(self) -> None:
        state = self.plain.state_dict()
        for name, value in self.pipe.state_dict().items():
            assert torch.equal(value, state[name]), name


def evaluation_leaves_gradients_alone(mesh: Mesh) -> None:
    both = Both(mesh, model())
    both.step(*batch(16))
    x, y = batch(12)
    both.pipe.eval()
    with torch.no_grad():
        both.pipe(x)
        both.pipe(x, target=y)
    both.pipe.train()
    both.assert_equal_gradients()
    both.step(*batch(16))
    both.assert_equal_gradients()


def statistics_see_data_only(mesh: Mesh) -> None:
    both = Both(mesh, model(), checkpoint="always")
    for rows in (16, 8):
        both.step(*batch(rows))
        both.assert_equal_state()
    counted = [value.item() for name, value in both.pipe.state_dict().items() if name.endswith("tracked")]
    assert counted
    assert set(counted) == {2 * CHUNKS}


def a_smaller_last_batch_is_smaller(mesh: Mesh) -> None:
    both = Both(mesh, model().eval())
    with torch.no_grad():
        for rows in (16, 8, 3, 1, 16):
            x, _ = batch(rows)
            expected = torch.cat([both.plain(part) for part in x.tensor_split(min(CHUNKS, rows))])
            assert torch.equal(both.pipe(x, outputs="all"), expected), rows
        both.pipe.train()  # only now there is dropout
        assert not torch.equal(both.pipe(x, outputs="all"), expected)


def replicas_are_reduced_and_hooks_called(mesh: Mesh) -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)).double()
    x, y = batch(16)
    x = x.double()
    F.cross_entropy(plain(x), y).backward()
    mine = slice(mesh.rank, None, 2)
    for schedule, balance in (("zb-h1", [2, 2]), ("zb-v", [1, 1, 1, 1])):
        settings: dict[str, Any] = {"schedule": schedule, "balance": balance, "devices": ["cpu", "cpu"]}
        pipe = Pipe(copy.deepcopy(plain).requires_grad_(), CHUNKS, loss_fn=F.cross_entropy, **settings)
        pipe.zero_grad()
        called: list[str] = []
        for name, parameter in pipe.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name, called=called: called.append(name))
        replica = DistributedDataParallel(pipe)
        replica(x[mine], target=y[mine]).backward()
        assert sorted(called) == sorted(name for name, _ in pipe.named_parameters()), schedule
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, plain.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
            assert spread(parameter.grad) == 0, name


def tied_weights_stay_tied(mesh: Mesh) -> None:
    plain = nn.Sequential(
        nn.Embedding(10, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 10, bias=False)
    ).double()
    plain[3].weight = plain[0].weight
    both = Both(mesh, plain, balance=[2, 2])
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (both.plain, both.pipe)]
    for _ in range(5):
        words = torch.randint(10, (16,))
        reference = reference_step(plain, words, words.roll(1), F.cross_entropy, CHUNKS, draw_key())
        loss = both.pipe(words, target=words.roll(1))
        loss.backward()
        torch.testing.assert_close(loss, reference.loss, rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    mine = both.pipe[0 if both.pipe.is_first else -1].weight
    torch.testing.assert_close(mine, plain[0].weight, rtol=1e-9, atol=1e-9)
    assert spread(mine) == 0


def every_weight_is_saved(mesh: Mesh) -> None:
    plain = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    both, loaded = Both(mesh, plain), Both(mesh, nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]))
    names = [""] * 2
    distributed.all_gather_object(names, sorted(both.pipe.state_dict()))
    assert sorted([*names[0], *names[1]]) == sorted(plain.state_dict())
    with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's, about its own parts
        folder = [own]
        distributed.broadcast_object_list(folder)
        checkpoint.save({"model": both.pipe.state_dict()}, checkpoint_id=folder[0])
        state = {"model": loaded.pipe.state_dict()}
        checkpoint.load(state, checkpoint_id=folder[0])
        loaded.pipe.load_state_dict(state["model"])
        distributed.barrier()  # the folder is not removed before
    loaded.plain.load_state_dict(plain.state_dict())
    loaded.assert_equal_state()


def clipping_is_by_the_norm_of_all(mesh: Mesh) -> None:
    for limit in (0.01, 1e6):
        both = Both(mesh, model())
        both.step(*batch(16))
        expected = nn.utils.clip_grad_norm_(both.plain.parameters(), limit)
        torch.testing.assert_close(both.pipe.clip_grad_norm_(limit), expected)
        for name, parameter in both.pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, both.plain.get_parameter(name).grad)


def batches_may_shrink_and_grow(mesh: Mesh) -> None:
    for schedule in ("1f1b", "gpipe", "zb-v"):
        plain = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
        both = Both(mesh, plain, schedule)
        for rows in (16, 4, 32, 8, 2, 17):  # the gradients add up
            both.step(*batch(rows))
            both.assert_equal_gradients()


def spread(tensor: Tensor) -> float:
    """The largest difference between what the ranks have."""
    high, low = tensor.detach().clone(), tensor.detach().clone()
    distributed.all_reduce(high, distributed.ReduceOp.MAX)
    distributed.all_reduce(low, distributed.ReduceOp.MIN)
    return (high - low).max().item()


BODIES = [
    evaluation_leaves_gradients_alone,
    statistics_see_data_only,
    a_smaller_last_batch_is_smaller,
    replicas_are_reduced_and_hooks_called,
    tied_weights_stay_tied,
    every_weight_is_saved,
    clipping_is_by_the_norm_of_all,
    batches_may_shrink_and_grow,
]


def everything(mesh: Mesh) -> dict[str, str]:
    """The failures."""
    failures = {}
    for body in BODIES:
        torch.manual_seed(0)
        try:
            body(mesh)
        except Exception:
            failures[body.__name__] = traceback.format_exc()
    return failures


@pytest.mark.thorough
def test_1_to_10_two_ranks_do_what_the_plain_model_does(on_ranks: Callable[..., list[Any]]) -> None:
    failures = on_ranks(2, everything)
    for rank, its in enumerate(failures):
        assert not its, f"rank {rank}:\n" + "\n".join(f"{name}\n{trace}" for name, trace in its.items())
