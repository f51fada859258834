"""torchgpipe's `GPipe` and fairscale's `Pipe` as their users know them; `differential` compares with the originals."""

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe
from tests.helpers import saved_and_loaded

CHECKPOINT_MODES = ("never", "except_last", "always")


def layers(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class Say(nn.Module):
    """Calls a function with its one argument."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: Any) -> Any:
        (argument,) = arguments
        return self.function(argument)


# Constructor


@pytest.mark.parametrize("balance", [(1, 2), torch.tensor([1, 2]), [1.0, 2.0]], ids=repr)
def test_a_balance_is_any_row_of_whole_numbers(adapter: Any, balance: Any) -> None:
    pipe = adapter.Pipe(layers(), balance, devices=["cpu"] * 2)
    assert pipe.balance == [1, 2]
    assert [type(count) for count in pipe.balance] == [int, int]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are devices")
def test_devices_are_all_cuda_devices_unless_told(adapter: Any) -> None:
    with pytest.raises(IndexError, match="devices: 0, partitions: 2"):
        adapter.Pipe(layers(), [1, 2])


def test_a_pipe_that_cannot_be_made_leaves_the_module_as_it_was(adapter: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.ReLU())
    with pytest.raises(IndexError):
        adapter.Pipe(module, [1, 1], devices=["cpu"], deferred_batch_norm=True)
    assert type(module[0]) is nn.BatchNorm1d


# Container


def test_the_dtype_may_change(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=1.0)
    assert pipe.to(torch.float16).to(dtype=torch.float32).half().double() is pipe
    pipe(torch.ones(2, 2, dtype=torch.float64)).sum().backward()
    before = pipe[0].weight.clone()
    optimizer.step()
    assert not torch.equal(pipe[0].weight, before)


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda pipe: pickle.loads(pickle.dumps(pipe)), lambda pipe: saved_and_loaded(pipe)],
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


# Forward


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_a_tuple_of_inputs(adapter: Any, checkpoint: str) -> None:
    pipe = adapter.pipe(nn.Sequential(Say(lambda pair: pair[0] * pair[1]), nn.Linear(2, 2)), [1, 1], 2, checkpoint)
    a, b = torch.randn(2, 4, 2).requires_grad_()
    inputs = [tensor.detach().requires_grad_() for tensor in (a, b)]
    output = pipe(tuple(inputs))
    output.sum().backward()
    gradients = torch.autograd.grad(pipe[1](a * b).sum(), (a, b))
    for tensor, gradient in zip(inputs, gradients, strict=True):
        torch.testing.assert_close(tensor.grad, gradient)


def test_settings_can_be_changed_later(adapter: Any) -> None:
    seen: list[tuple[int, bool]] = []
    is_recomputing = adapter.module().is_recomputing
    see = Say(lambda x: (seen.append((len(x), is_recomputing())), x * 1)[1])
    pipe = adapter.pipe(nn.Sequential(nn.Linear(1, 1), see), [1, 1], 1, "never")
    for chunks, checkpoint in ((1, "never"), (4, "never"), (2, "always"), (2, "except_last")):
        pipe.chunks, pipe.checkpoint = chunks, checkpoint
        assert (pipe.chunks, pipe.checkpoint) == (chunks, checkpoint)
        seen.clear()
        pipe(torch.ones(4, 1)).sum().backward()
        recomputed = {"never": 0, "except_last": chunks - 1, "always": chunks}[checkpoint]
        assert sorted(seen) == sorted([(4 // chunks, False)] * chunks + [(4 // chunks, True)] * recomputed)
    with pytest.raises(ValueError, match="chunks"):
        pipe.chunks = 0
    with pytest.raises(ValueError, match="checkpoint"):
        pipe.checkpoint = "sometimes"
    assert (pipe.chunks, pipe.checkpoint) == (2, "except_last")


def test_a_single_micro_batch_is_the_callers_own(adapter: Any) -> None:
    """The un-partitioned `nn.Identity` returns its input; the old libraries concatenated even a single output."""
    for chunks, rows in ((1, 3), (4, 1)):
        x = torch.ones(rows, 2)
        pipe = adapter.pipe(nn.Sequential(nn.Identity(), Say(lambda x: (x, x.sum(), x.t()))), [1, 1], chunks)
        for output in pipe(x):
            output.add_(1).view(-1)
        assert torch.equal(x, torch.ones(rows, 2))
    tanh = adapter.pipe(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), [1, 1])
    tanh(x).mul_(2).sum().backward()


# Batch norm


def test_deferred_batch_norm(adapter: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(nn.BatchNorm1d(2)), nn.BatchNorm1d(2).eval())
    whole = copy.deepcopy(module).double()
    pipe = adapter.pipe(module, [2, 1], 4, "always", deferred_batch_norm=True).double()
    deferred = adapter.module("batchnorm").DeferredBatchNorm
    assert [type(batch_norm) for batch_norm in (pipe[0], pipe[1][0], pipe[2])] == [deferred] * 3
    assert [pipe[0].chunks, pipe[0].training, pipe[2].training] == [4, True, False]
    x = torch.randn(6, 2, dtype=torch.float64)  # three micro-batches
    pipe(x).sum().backward()
    whole[0](x)
    for name, expected in whole[0].named_buffers():
        torch.testing.assert_close(pipe[0].get_buffer(name), expected, rtol=1e-12, atol=1e-14)


# Errors, and what is left behind


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("error", [ZeroDivisionError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_the_layers_own_exception_comes_out(adapter: Any, error: BaseException, checkpoint: str) -> None:
    fails = True

    def fail(x: Tensor) -> Tensor:
        if fails:
            raise error
        return x

    pipe = adapter.pipe(nn.Sequential(nn.Linear(2, 2), Say(fail), nn.Linear(2, 2)), [1, 1, 1], 2, checkpoint)
    with pytest.raises(type(error)) as caught:
        pipe(torch.ones(4, 2))
    assert caught.value is error
    fails = False
    assert pipe(torch.ones(4, 2)).shape == (4, 2)


def test_no_thread_is_left_behind(adapter: Any, own_workers: Callable[[], list[threading.Thread]]) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    pipe(torch.ones(4, 2)).sum().backward()
    workers = own_workers()
    assert len(workers) == 2
    del pipe
    for worker in workers:
        worker.join(10)
        assert not worker.is_alive()


# Replaced layers


def test_a_layer_can_be_replaced(adapter: Any) -> None:
    pipe = adapter.pipe(layers(), [1, 2], 2)
    pipe(torch.ones(4, 2))
    pipe.partitions[1][0] = nn.Tanh()
    assert pipe[1] is pipe.partitions[1][0]
    expected = pipe[2](torch.tanh(pipe[0](torch.ones(4, 2))))
    torch.testing.assert_close(pipe(torch.ones(4, 2)), expected)
    pipe.partitions[1].add_module("more", nn.Tanh())
    with pytest.raises(ValueError, match="made with 3 layers, and its partitions have 4 now"):
        pipe(torch.ones(4, 2))


def test_it_is_a_pipe_inside(adapter: Any) -> None:
    """Gradients are those of `pipework.Pipe`, where both split alike; two of them have the same sum in either order."""
    module = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Tanh(), nn.Linear(4, 2))
    native = Pipe(copy.deepcopy(module), 2, balance=[2, 2], devices=["cpu"] * 2)
    pipe = adapter.pipe(module, [2, 2], 2, "except_last")
    x = torch.randn(8, 2)
    for each in (native, pipe):
        torch.manual_seed(1)
        each(x).square().sum().backward()
    for mine, expected in zip(pipe.parameters(), native.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)


@pytest.mark.gpu
def test_on_an_accelerator(adapter: Any) -> None:
    device = torch.accelerator.current_accelerator()
    plain = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)).to(device)
    pipe = adapter.Pipe(copy.deepcopy(plain).cpu(), [1, 2], devices=[device, device], chunks=2, checkpoint="always")
    assert [parameter.device.type for parameter in pipe.parameters()] == [device.type] * 4
    x = torch.randn(4, 2, device=device)
    plain(x).square().sum().backward()
    pipe(x).square().sum().backward()
    for mine, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad)
