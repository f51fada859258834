"""torchgpipe's `GPipe` and fairscale's `Pipe` alone; `differential` compares them with the originals."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipework.compat.fairscale.nn import Pipe
from tests.compat.originals import Say, layers
from tests.helpers import saved_and_loaded


def test_partitions_of_fairscale_on_several_devices_cannot_share_a_parameter() -> None:
    module = layers()
    module[2].weight = module[0].weight
    with pytest.raises(ValueError, match=r"^module with duplicate parameters on distinct devices is not supported$"):
        Pipe(module, [1, 2], devices=["cpu", "meta"])


def test_the_dtype_may_change_behind_an_optimizer(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    assert pipe.to(torch.float16).to(dtype=torch.float32).half().double() is pipe
    pipe(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
    before = pipe[0].weight.clone()
    optimizer.step()
    assert not torch.equal(pipe[0].weight, before)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), saved_and_loaded],
    ids=["copied", "pickled", "saved"],
)
def test_copies_are_pipes_of_their_own(adapter: Any, duplicate: Callable[[Any], Any]) -> None:
    original = adapter.pipe(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2)), [2, 1], 3, "always")
    x = torch.randn(6, 2)
    original(x).sum().backward()
    twin = duplicate(original)
    for name in ("chunks", "checkpoint", "balance", "devices"):
        assert getattr(twin, name) == getattr(original, name)
    twin.zero_grad()
    original.zero_grad()
    twin(x).sum().backward()
    assert original[0].weight.grad is None
    assert (original[1].num_batches_tracked, twin[1].num_batches_tracked) == (3, 6)
    original(x).sum().backward()
    assert torch.equal(original[0].weight.grad, twin[0].weight.grad)
    twin.chunks = 2
    assert original.chunks == 3


def test_a_single_micro_batch_is_the_callers_own(adapter: Any) -> None:
    """The un-partitioned `nn.Identity` returns its input; the old libraries concatenated even a single output."""
    for chunks, rows in ((1, 3), (4, 1)):
        x = torch.ones(rows, 2)
        pipe = adapter.pipe(nn.Sequential(nn.Identity(), Say(lambda x: (x, x.sum(), x.t()))), [1, 1], chunks)
        for output in pipe(x):
            output.add_(1).view(-1)
        assert torch.equal(x, torch.ones(rows, 2))


def test_balances(adapter: Any) -> None:
    pair = (torch.ones(4, 2), torch.ones(4, 2, requires_grad=True))
    both = nn.Sequential(*(Say(lambda pair: (pair[0] + pair[1], pair[1])) for _ in range(2)))
    assert adapter.module("balance").balance_by_size(2, both, pair) == [1, 1]
    assert adapter.module("balance").balance_by_time(2, both, pair, timeout=0.05) == [1, 1]
    solve = adapter.module("balance.blockpartition").solve
    assert solve([1, 2, 3, 4, 5, 6], partitions=2) == [[1, 2, 3, 4], [5, 6]]
    assert solve([0.5, 0.25]) == [[0.5, 0.25]]


@pytest.mark.gpu
def test_on_an_accelerator(adapter: Any) -> None:
    device = torch.accelerator.current_accelerator()
    plain = layers().to(device)
    pipe = adapter.Pipe(copy.deepcopy(plain).cpu(), [1, 2], devices=[device, device], chunks=2, checkpoint="always")
    assert [parameter.device.type for parameter in pipe.parameters()] == [device.type] * 4
    x = torch.randn(4, 2, device=device)
    plain(x).square().sum().backward()
    pipe(x).square().sum().backward()
    for mine, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
