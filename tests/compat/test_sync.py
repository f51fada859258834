"""The old `Pipe` as its users know it: what it refuses, what it is as a container, what goes in and comes out."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeWarning
from pipework.compat.sync import (
    BalanceError,
    NoChunk,
    Pipe,
    WithDevice,
    balance_by_size,
    balance_by_time,
    is_checkpointing,
    partition_model,
)
from pipework.model.batchnorm import DeferredBatchNorm
from tests.compat.originals import Say
from tests.helpers import MOVES

pytestmark = pytest.mark.usefixtures("rpc")


def layers(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def output(*modules: nn.Module, x: Any, chunks: int = 2) -> Any:
    """What a pipe of layers gives for one input."""
    return Pipe(nn.Sequential(*modules), chunks)(x).local_value()


# Constructor


@pytest.mark.parametrize("wrap", [nn.ModuleList, lambda parts: nn.Sequential(*parts)], ids=["layer", "sequence"])
def test_a_layer_on_two_devices_is_refused(wrap: Callable[[list[nn.Module]], nn.Module]) -> None:
    layer = wrap([nn.Linear(2, 2), nn.Linear(2, 2, device="meta")])
    message = (
        f"nn.Module: {layer}, should have all parameters on a single device, "
        "please use .to() to place the module on a single device"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Pipe(nn.Sequential(nn.Linear(2, 2), layer))


def test_what_is_wrong_is_told_in_the_old_order() -> None:
    twice = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="number of chunks must be positive integer"):
        Pipe(None, 0, "INVALID")
    with pytest.raises(ValueError, match="checkpoint is not one of 'always', 'except_last', or 'never'"):
        Pipe(None, 1, "INVALID")
    with pytest.raises(TypeError, match=r"module must be nn\.Sequential to be partitioned"):
        Pipe(None)
    with pytest.raises(ValueError, match="module with duplicate children is not supported"):
        Pipe(nn.Sequential(twice, twice, nn.ModuleList([twice, nn.Linear(2, 2, device="meta")])))
    with pytest.raises(ValueError, match="'cuda:99'"):
        Pipe(nn.Sequential(nn.Linear(2, 2), WithDevice(nn.ReLU(), "cuda:99")))
    with pytest.raises(TypeError, match=r"^NoChunk only supported for tensors"):
        NoChunk("mask")


# Container


def test_what_a_pipe_has_and_lacks() -> None:
    pipe = Pipe(nn.Sequential(first := nn.Linear(2, 2), WithDevice(nn.Sequential(nn.ReLU(), nn.RMSNorm(2)), "cpu")))
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert pipe.devices == [torch.device("cpu")] * 2
    assert [name for name, _ in pipe.named_parameters()] == [
        "partitions.0.0.weight", "partitions.0.0.bias", "partitions.1.1.weight",
    ]  # fmt: skip
    assert (pipe[0], len(pipe)) == (first, 3)
    assert not hasattr(Pipe(nn.Sequential()), "0")
    assert issubclass(BalanceError, ValueError)


@pytest.mark.parametrize("move", MOVES)
def test_moving_is_refused(move: Callable[[Pipe], object]) -> None:
    message = r"^denied to move parameters and buffers, because Pipe should manage device placement$"
    with pytest.raises(TypeError, match=message):
        move(Pipe(layers()))


def test_a_layer_put_into_a_partition_is_run_but_a_partition_cannot_grow() -> None:
    pipe, x = Pipe(layers(), chunks=2, deferred_batch_norm=True), torch.randn(4, 2)
    pipe(x)
    pipe.partitions[1][0] = nn.BatchNorm1d(2)
    pipe.partitions[0] = nn.Sequential(nn.Linear(2, 2))
    for _ in range(2):
        pipe(x).local_value().sum().backward()
    assert pipe.partitions[0][0].weight.grad is not None
    assert isinstance(pipe.partitions[1][0], DeferredBatchNorm)
    assert pipe.partitions[1][0].num_batches_tracked == 2
    pipe.eval()
    torch.testing.assert_close(pipe(x).local_value(), pipe[1](pipe[0](x)))
    pipe.partitions[1].append(nn.ReLU())
    with pytest.raises(ValueError, match="was made with 2 layers, and its partitions have 3 now"):
        pipe(x)


def test_hooks_of_a_partition_are_not_called_and_a_warning_says_so() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Tanh())), 2)
    pipe.partitions[1].register_forward_hook(lambda *arguments: pytest.fail("called"))
    with pytest.warns(PipeWarning, match=r"partitions\[1\] has hooks, which are not called") as caught:
        pipe(torch.ones(4, 2))
    assert [each.filename for each in caught] == [__file__]
    pipe(torch.ones(4, 2))  # it is told once


# What goes in, and what comes out


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [(9, 8, [2, 2, 2, 2, 1]), (8, 8, [1] * 8), (3, 8, [1] * 3), (7, 3, [3, 3, 1]), (5, 1, [5])],
)
def test_tensors_are_cut_as_torch_chunk_does(rows: int, chunks: int, expected: list[int]) -> None:
    seen: list[int] = []
    x = torch.randn(rows, 2)
    assert torch.equal(output(Say(lambda x: (seen.append(len(x)), x)[1]), x=x, chunks=chunks), x)
    assert seen == expected


def test_only_tensors_themselves_are_cut() -> None:
    seen: list[list[Any]] = []

    def layer(x: Tensor, whole: Tensor, *others: Any) -> Tensor:
        seen.append([len(x), len(whole), *others[:3]])
        return x * others[3][0]["tensor"].sum() + others[4][0].sum()

    x, inner = torch.ones(4, requires_grad=True), torch.ones(3, requires_grad=True)
    pipe = Pipe(nn.Sequential(Say(layer)), chunks=2)
    given = pipe(x, NoChunk(torch.zeros(3)), None, "text", 5, ({"tensor": inner}, None), [x]).local_value()
    assert seen == [[2, 3, None, "text", 5]] * 2
    assert given.tolist() == [7.0] * 4  # 1 * 3 + 4
    given.sum().backward()
    assert x.grad.tolist() == [7.0] * 4  # 3, and 1 for each row
    assert inner.grad.tolist() == [4.0] * 3  # 1 for each row


def test_tensors_must_fall_into_equally_many_pieces() -> None:
    pipe = Pipe(nn.Sequential(Say(lambda x, y: x.sum()[None] + y.sum())), chunks=4)
    assert pipe(torch.ones(4), torch.ones(8)).local_value().tolist() == [3.0] * 4
    with pytest.raises(RuntimeError, match=r"^Found different number of chunks produced for inputs: 3 and 4$"):
        pipe(torch.ones(3), torch.ones(4))


@pytest.mark.parametrize("inputs", [(), (5,), ([torch.ones(2)],), (NoChunk(torch.ones(2)),), ((torch.ones(2),), None)])
def test_a_tensor_is_needed(inputs: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=f"^{re.escape(f'inputs do not have any tensors: {inputs}')}$"):
        Pipe(layers())(*inputs)


def test_inputs_must_be_where_the_first_partition_is() -> None:
    pipe, here, elsewhere = Pipe(nn.Sequential(nn.Bilinear(2, 2, 2))), torch.ones(2, 2), torch.ones(2, 2, device="meta")
    for inputs in ((elsewhere, elsewhere), (here, elsewhere), (elsewhere, here)):
        with pytest.raises(ValueError, match=r"^All inputs should be on the same device as the first partition$"):
            pipe(*inputs)


def test_what_layers_hand_on_and_what_comes_out() -> None:
    pair = nn.Sequential(Say(lambda x, y: (x + y, "text", None)), Say(lambda z, text, nothing: (z, text, z.mean())))
    tensor, text, mean = output(Say(lambda x: (x, 2 * x)), pair, x=torch.tensor([1.0, 1.0, 2.0]))
    assert (tensor.tolist(), text) == ([3.0, 3.0, 6.0], ["text", "text"])
    assert mean.item() == 4.0  # of two rows and of one


def test_without_layers_the_input_comes_back() -> None:
    empty, x = Pipe(nn.Sequential()), torch.tensor([42])
    assert empty(x).local_value() is x
    with pytest.raises(TypeError, match="inputs do not have any tensors"):
        empty(42)
    assert torch.equal(output(nn.Sequential(), nn.Sequential(nn.Sequential(), nn.Identity()), x=x), x)


def test_chunks_and_checkpoint_may_change_between_mini_batches() -> None:
    seen: list[bool] = []
    pipe = Pipe(nn.Sequential(Say(lambda x: (seen.append(is_checkpointing()), x)[1]), nn.Linear(2, 2)), 2, "never")
    for chunks, checkpoint, expected in (
        (2, "never", [False] * 2),
        (4, "except_last", [True] * 3 + [False]),
        (1, "always", [True]),
    ):
        pipe.chunks, pipe.checkpoint = chunks, checkpoint
        pipe(torch.randn(4, 2))
        assert (seen, pipe.chunks, pipe.checkpoint) == (expected, chunks, checkpoint)
        seen.clear()


# Balance


def test_balances_of_several_inputs() -> None:
    pairs, quickly = nn.Sequential(*(Say(lambda x, y: (x, y)) for _ in range(2))), {"timeout": 0.01, "device": "cpu"}
    for kind in (list, tuple):
        sample = kind([torch.rand(2), torch.rand(2)])
        assert balance_by_time(1, pairs, sample, **quickly) == balance_by_size(1, pairs, sample, device="cpu") == [2]


def test_layers_are_grouped_and_counted_from_0_in_each_partition() -> None:
    module = layers(3)
    partitions = partition_model(module, [2, 1], ["cpu", "meta"])
    assert [list(partition) for partition in partitions] == [[module[0], module[1]], [module[2]]]
    assert list(partitions.state_dict())[-1] == "1.0.bias"
    assert [partition[0].weight.device.type for partition in partitions] == ["cpu", "meta"]
    with pytest.raises(ValueError, match="the number of layers"):
        partition_model(layers(3), [2, 2], ["cpu", "cpu"])
    with pytest.raises(IndexError, match="too few devices"):
        partition_model(layers(3), [2, 1], ["cpu"])
