"""The old `Pipe` as its users know it: what it refuses, what it is as a container, what goes in and comes out."""

import copy
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import PipeWarning
from pipework.compat.sync import NoChunk, Pipe, WithDevice, is_checkpointing
from pipework.model.batchnorm import DeferredBatchNorm
from tests.helpers import MOVES, saved_and_loaded

pytestmark = pytest.mark.usefixtures("rpc")


def layers(count: int = 2) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class Say(nn.Module):
    """Calls a function with its inputs and returns what that returns."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any) -> Any:
        return self.function(*inputs)


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
    with pytest.raises(ValueError, match="chunks"):
        Pipe(None, 0, "INVALID")
    with pytest.raises(ValueError, match="checkpoint"):
        Pipe(None, 1, "INVALID")
    with pytest.raises(TypeError, match=r"nn\.Sequential"):
        Pipe(None)
    with pytest.raises(ValueError, match="duplicate children"):
        Pipe(nn.Sequential(twice, twice, nn.ModuleList([twice, nn.Linear(2, 2, device="meta")])))


def test_no_chunk_is_for_tensors() -> None:
    with pytest.raises(TypeError, match=r"^NoChunk only supported for tensors"):
        NoChunk("mask")


# Container


def test_partitions_and_devices() -> None:
    pipe = Pipe(layers(2))
    assert isinstance(pipe.partitions, nn.ModuleList)
    assert all(isinstance(partition, nn.Sequential) for partition in pipe.partitions)
    assert pipe.devices == [torch.device("cpu")] * 2


def test_layers_are_not_attributes() -> None:
    pipe = Pipe(nn.Sequential(OrderedDict(first=nn.Linear(2, 2))))
    assert "partitions.0.0" in dict(pipe.named_modules())
    with pytest.raises(AttributeError):
        pipe.first  # noqa: B018


@pytest.mark.parametrize("move", MOVES)
def test_moving_is_refused(move: Callable[[Pipe], object]) -> None:
    message = r"^denied to move parameters and buffers, because Pipe should manage device placement$"
    with pytest.raises(TypeError, match=message):
        move(Pipe(layers()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
@pytest.mark.parametrize("used", [False, True])
def test_copies_stand_alone(duplicate: Callable[[Pipe], Pipe], used: bool) -> None:
    pipe, x = Pipe(layers(), 2, "always"), torch.randn(4, 2)
    if used:
        pipe(x)
    other = duplicate(pipe)
    assert (other.chunks, other.checkpoint, other.devices) == (pipe.chunks, pipe.checkpoint, pipe.devices)
    assert torch.equal(other(x).local_value(), pipe(x).local_value())
    other(x).local_value().sum().backward()
    assert all(parameter.grad is not None for parameter in other.parameters())
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_layer_put_into_a_partition_is_run() -> None:
    pipe, x = Pipe(layers(), chunks=2), torch.randn(4, 2)
    pipe(x)
    pipe.partitions[1][0] = nn.Linear(2, 7)
    pipe(x).local_value().sum().backward()
    assert pipe(x).local_value().shape == (4, 7)
    assert pipe.partitions[1][0].weight.grad is not None
    pipe.partitions[0] = nn.Sequential(nn.Linear(2, 2))
    assert torch.equal(pipe(x).local_value(), pipe[1](pipe[0](x)))


def test_a_partition_cannot_grow() -> None:
    pipe = Pipe(layers())
    pipe.partitions[1].append(nn.ReLU())
    with pytest.raises(ValueError, match="was made with 2 layers, and its partitions have 3 now"):
        pipe(torch.randn(4, 2))


# What goes in, and what comes out


def test_the_output_is_a_reference() -> None:
    pipe, x = Pipe(layers(), chunks=3), torch.randn(6, 2)
    reference = pipe(x)
    assert isinstance(reference, torch.distributed.rpc.RRef)
    assert reference.is_owner()
    torch.testing.assert_close(reference.local_value(), pipe[1](pipe[0](x)))
    assert torch.equal(reference.to_here(), reference.local_value())


@pytest.mark.parametrize(
    ("rows", "chunks", "expected"),
    [(9, 8, [2, 2, 2, 2, 1]), (8, 8, [1] * 8), (3, 8, [1] * 3), (7, 3, [3, 3, 1]), (5, 1, [5])],
)
def test_tensors_are_cut_as_torch_chunk_does(rows: int, chunks: int, expected: list[int]) -> None:
    seen: list[int] = []
    look = Say(lambda x: seen.append(len(x)) or x)  # type: ignore[func-returns-value]
    x = torch.randn(rows, 2)
    assert torch.equal(Pipe(nn.Sequential(look), chunks)(x).local_value(), x)
    assert seen == expected


def test_what_is_no_tensor_goes_to_every_micro_batch() -> None:
    seen: list[Any] = []

    def look(x: Tensor, *others: Any) -> Tensor:
        seen.append((len(x), *others))
        return x

    mask = torch.zeros(3)
    inside = {"mask": mask, "number": 5}
    pipe = Pipe(nn.Sequential(Say(look)), chunks=2)
    pipe(torch.randn(4, 2), NoChunk(mask), None, "text", 5, inside, [mask])
    assert len(seen) == 2
    for rows, whole, nothing, text, number, mapping, listed in seen:
        assert (rows, nothing, text, number) == (2, None, "text", 5)
        assert torch.equal(whole, mask)
        assert mapping.keys() == inside.keys()
        assert torch.equal(mapping["mask"], mask)
        assert torch.equal(listed[0], mask)


@dataclass
class Box:
    tensor: Tensor


def test_tensors_within_other_values_are_not_cut() -> None:
    layer = Say(lambda x, pair, box, again: x * pair[0]["tensor"].sum() * box.tensor.sum() + again[0].sum())
    x, inner = torch.ones(4, requires_grad=True), torch.ones(3, requires_grad=True)
    output = Pipe(nn.Sequential(layer), chunks=2)(x, ({"tensor": inner}, None), Box(inner), [x]).local_value()
    assert output.tolist() == [13.0] * 4  # 1 * 3 * 3 + 4
    output.sum().backward()
    assert x.grad.tolist() == [13.0] * 4  # 3 * 3, and 1 for each row
    assert inner.grad.tolist() == [24.0] * 3  # (3 + 3) for each row


def test_tensors_of_different_lengths_may_give_equally_many_pieces() -> None:
    pipe = Pipe(nn.Sequential(Say(lambda x, y: x.sum()[None] + y.sum())), chunks=2)
    assert pipe(torch.ones(4), torch.ones(8)).local_value().tolist() == [6.0, 6.0]


def test_tensors_that_fall_into_different_numbers_of_pieces_are_refused() -> None:
    pipe = Pipe(nn.Sequential(Say(lambda x, y: x)), chunks=4)
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


def test_a_tuple_is_spread_into_the_next_layer() -> None:
    pipe = Pipe(
        nn.Sequential(
            Say(lambda x: (x, 2 * x)),
            nn.Sequential(Say(lambda x, y: (x + y, "text", None)), Say(lambda z, text, nothing: (z, text))),
        ),
        chunks=2,
    )
    tensor, text = pipe(torch.ones(4)).local_value()
    assert tensor.tolist() == [3.0] * 4
    assert text == ["text", "text"]


def test_outputs_that_are_no_tensors_come_as_lists() -> None:
    pipe = Pipe(nn.Sequential(Say(lambda x: (x, 5))), chunks=2)
    x = torch.randn(4, 2)
    tensor, number = pipe(x).local_value()
    assert torch.equal(tensor, x)
    assert number == [5, 5]


@pytest.mark.parametrize("chunks", [1, 2])
def test_an_output_can_be_viewed_as_one_piece(chunks: int) -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 3), Say(lambda x: x.transpose(1, 2))), chunks)
    output = pipe(torch.randn(4, 5, 2)).local_value()
    output.view(-1, 5).sum().backward()
    assert pipe[0].weight.grad is not None
    pair = Pipe(nn.Sequential(Say(lambda x: (x.t(), x))), chunks)(torch.randn(2, 2)).local_value()
    assert pair[0].is_contiguous()


def test_images_keep_their_layout_in_memory() -> None:
    x = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    for chunks in (1, 2):
        output = Pipe(nn.Sequential(nn.Identity()), chunks)(x).local_value()
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(output, x)


def test_without_layers_the_input_comes_back() -> None:
    empty, x = Pipe(nn.Sequential()), torch.tensor([42])
    assert empty(x).local_value() is x
    with pytest.raises(TypeError, match="inputs do not have any tensors"):
        empty(42)


@pytest.mark.parametrize("module", [nn.Sequential(nn.Sequential()), nn.Sequential(nn.Sequential(), nn.Identity())])
def test_empty_sequences_do_nothing(module: nn.Sequential) -> None:
    x = torch.randn(4, 2)
    assert torch.equal(Pipe(module, chunks=2)(x).local_value(), x)


def test_no_grad_and_frozen_layers() -> None:
    pipe, x = Pipe(layers(), chunks=2), torch.randn(4, 2)
    with torch.no_grad():
        assert not pipe(x).local_value().requires_grad
    assert pipe(x).local_value().requires_grad
    pipe.requires_grad_(False)
    assert not pipe(x).local_value().requires_grad


def test_errors_of_layers_come_as_they_are_and_the_pipe_stays_usable() -> None:
    class Trouble(Exception):
        pass

    def raise_trouble(x: Tensor) -> Tensor:
        if x.sum() > 0:
            raise Trouble
        return x

    pipe = Pipe(nn.Sequential(nn.Identity(), Say(raise_trouble)), chunks=2)
    with pytest.raises(Trouble):
        pipe(torch.ones(4))
    assert pipe(-torch.ones(4)).local_value().shape == (4,)


# Micro-batches


def checkpointed(pipe: Pipe, x: Tensor) -> list[bool]:
    """For each micro-batch, whether it is computed again."""
    seen: list[bool] = []
    look = pipe[0]
    assert isinstance(look, Say)
    look.function = lambda x: seen.append(is_checkpointing()) or x  # type: ignore[func-returns-value]
    pipe(x)
    return seen


def test_chunks_and_checkpoint_may_change_between_mini_batches() -> None:
    pipe, x = Pipe(nn.Sequential(Say(lambda x: x), nn.Linear(2, 2)), 2, "never"), torch.randn(4, 2)
    assert checkpointed(pipe, x) == [False, False]
    pipe.chunks = 4
    assert checkpointed(pipe, x) == [False] * 4
    pipe.checkpoint = "except_last"
    assert checkpointed(pipe, x) == [True, True, True, False]
    pipe.checkpoint = "always"
    pipe.chunks = 1
    assert checkpointed(pipe, x) == [True]
    assert (pipe.chunks, pipe.checkpoint) == (1, "always")


# Deferred batch norm


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
def test_deferred_batch_norms_see_the_whole_mini_batch(checkpoint: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    expected = copy.deepcopy(module[1][0])
    pipe = Pipe(module, 4, checkpoint, deferred_batch_norm=True)
    assert isinstance(pipe.partitions[1][0], DeferredBatchNorm)
    assert "partitions.1.0.running_mean" in pipe.state_dict()
    x = torch.randn(8, 3)
    pipe(x).local_value().sum().backward()
    expected(module[0](x))
    torch.testing.assert_close(pipe[1].running_mean, expected.running_mean)
    torch.testing.assert_close(pipe[1].running_var, expected.running_var)


def test_a_batch_norm_put_into_a_partition_is_deferred_too() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), 2, deferred_batch_norm=True)
    pipe.partitions[1][0] = nn.BatchNorm1d(3)
    pipe(torch.randn(4, 3))
    assert isinstance(pipe.partitions[1][0], DeferredBatchNorm)
    once = pipe.partitions[1][0]
    pipe(torch.randn(4, 3))
    assert pipe.partitions[1][0] is once
    assert once.num_batches_tracked == 2


# Wrappers


def test_with_device_leaves_no_trace_in_names() -> None:
    module = nn.Sequential(
        WithDevice(nn.Linear(2, 2), "cpu"), WithDevice(nn.Sequential(nn.ReLU(), nn.RMSNorm(2)), "cpu")
    )
    pipe = Pipe(module)
    assert [name for name, _ in pipe.named_parameters()] == [
        "partitions.0.0.weight",
        "partitions.0.0.bias",
        "partitions.1.1.weight",
    ]
    assert pipe(torch.randn(4, 2)).local_value().shape == (4, 2)


def test_with_device_of_a_device_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="'cuda:99'"):
        Pipe(nn.Sequential(nn.Linear(2, 2), WithDevice(nn.ReLU(), "cuda:99")))


def test_hooks_of_a_partition_are_not_called_and_a_warning_says_so() -> None:
    pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Tanh())), 2)
    pipe.partitions[1].register_forward_hook(lambda *arguments: pytest.fail("called"))
    with pytest.warns(PipeWarning, match=r"partitions\[1\] has hooks, which are not called") as caught:
        pipe(torch.ones(4, 2))
    assert [each.filename for each in caught] == [__file__]
    pipe(torch.ones(4, 2))  # it is told once
