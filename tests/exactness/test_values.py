"""What crosses a boundary or leaves the pipe: any nesting of tensors and plain values, with its gradients."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from pipework import Chunk, MicroBatches, NoChunk, PipeSequential
from tests.conftest import WAYS
from tests.ranks import held

outside = WAYS["outside"].pipe
Pair = namedtuple("Pair", "left right")


@dataclass
class State:
    hidden: torch.Tensor
    count: int
    extra: dict[str, torch.Tensor | None]


class Pack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        return State(y, 7, {"double": y * 2, "none": None, "whole": [Pair(y.detach(), (x > 0).long())]})


class Unpack(nn.Module):
    def forward(self, state):
        assert isinstance(state, State)
        assert state.count == 7
        assert state.extra["none"] is None
        pair = state.extra["whole"][0]
        assert isinstance(pair, Pair)
        assert not pair.left.requires_grad
        return state.hidden * state.extra["double"] + pair.left * pair.right


def test_nested_values_leave_the_pipe() -> None:
    pack = Pack()
    x = torch.randn(5, 3)
    expected = pack.linear(x)
    pipe = outside(nn.Sequential(nn.Identity(), nn.Identity(), pack), 2, balance=[1, 1, 1], share=True)
    state = pipe(x)
    torch.testing.assert_close(state.hidden, expected)
    assert state.count == [7, 7]
    assert state.extra["none"] == [None, None]
    assert torch.equal(state.extra["whole"][0].right, (x > 0).long())
    assert [t.requires_grad for t in (state.hidden, state.extra["double"], state.extra["whole"][0].left)] == [
        True,
        True,
        False,
    ]
    state.extra["double"].sum().backward()
    assert (pack.linear.weight.grad is not None) == pipe.is_last


@dataclass
class Settings:
    heads: int = 4


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor
    double: torch.Tensor = field(init=False)
    late: torch.Tensor = field(init=False, repr=False)
    rows: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", self.hidden * 2)
        object.__setattr__(self, "rows", len(self.hidden))


class PackFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        state = Frozen(self.linear(x))
        object.__setattr__(state, "late", x.sin())
        return state


class UnpackFrozen(nn.Module):
    def forward(self, state):
        assert type(state) is Frozen
        assert state.rows == len(state.hidden)
        return state.hidden * state.double + state.late


class PackOutput(nn.Module):
    """Gives an output of transformers, of which two fields are left out, and one has no gradient in a part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        outputs = pytest.importorskip("transformers.modeling_outputs")
        y = self.linear(x)
        return outputs.BaseModelOutputWithPooling(last_hidden_state=y, hidden_states=(x.detach() * 2, y * 2))


class UnpackOutput(nn.Module):
    def forward(self, state):
        assert type(state).__name__ == "BaseModelOutputWithPooling"
        assert list(state) == ["last_hidden_state", "hidden_states"]
        assert state.pooler_output is None
        first, second = state.hidden_states
        return state[0] * first + second


def test_a_dataclass_without_tensors_leaves_the_pipe_as_it_is() -> None:
    class Configured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Settings(8)

        def forward(self, x):
            return x, self.settings

    configured = Configured()
    pipe = outside(nn.Sequential(nn.Identity(), configured), 2, balance=[1, 1], share=True)
    _, settings = pipe(torch.randn(4, 3))
    assert type(settings) is list
    assert [one is configured.settings for one in settings] == [pipe.is_last] * 2
    assert settings == [Settings(8)] * 2


@pytest.mark.parametrize(("pack", "unpack"), [(Pack, Unpack), (PackFrozen, UnpackFrozen), (PackOutput, UnpackOutput)])
def test_nested_values_cross_a_boundary(way: Any, pack: type, unpack: type, checkpoint: str) -> None:
    plain = nn.Sequential(pack(), unpack(), pack(), unpack()).double()
    pipe = way.pipe(plain, 3, checkpoint, balance=[1, 1, 1, 1])
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    expected = way.reference(plain, x, y, 1, key=0)
    loss, output = way.run(pipe, x, y)
    torch.testing.assert_close(output, expected.output, rtol=1e-12, atol=1e-15)
    loss.backward()
    for expected, actual in zip(held(plain, pipe).parameters(), pipe.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-12, atol=1e-15)


class Lie(nn.Module):
    """Gives tensors that lie in memory in several ways, and notes how those lie that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 2, 1)
        self.seen: list[list[tuple[int, ...]]] = []

    def forward(self, x, *others):
        self.seen.append([tensor.stride() for tensor in others if tensor.numel()])
        y = self.convolution(x.to(memory_format=torch.channels_last))
        spectrum = torch.view_as_complex(torch.stack([y, y * 2], -1))
        sparse = y.detach()[:, :, ::2]
        result = y, y.transpose(2, 3), y.permute(3, 1, 0, 2), spectrum.conj(), y[:0], y.mean(), sparse
        factor = 1 + 0.01 * sum(other.abs().sum() for other in others)
        return tuple(each * factor for each in result)


class Lies(nn.Module):
    def forward(self, x, *others):
        return x + 0.01 * sum(other.abs().sum() for other in others)


def test_tensors_cross_a_boundary_as_they_lie_in_memory(
    way: Any, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    def near(actual: torch.Tensor, expected: torch.Tensor) -> None:  # gradients of views of one tensor are added
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)

    plain = PipeSequential(*(Lie() for _ in range(4)), Lies()).double()
    pipe = way.pipe(plain, 2, checkpoint, balance=[1, 1, 1, 1, 1])
    batches = [(torch.randn(rows, 2, 3, 4).double(),) for rows in (4, 4, 5)]
    assert_trained_alike(plain, pipe, batches, way=way, same=near)
    for expected, actual in zip(held(plain, pipe), pipe, strict=True):
        if isinstance(expected, Lie):
            assert set(map(tuple, expected.seen)) == set(map(tuple, actual.seen))


def test_pytorch_is_told_nothing_of_the_users_dataclasses() -> None:
    outside(nn.Sequential(Pack(), Unpack()), 2, balance=[1, 1])(torch.randn(4, 3))
    state = Pack()(torch.randn(4, 3))
    leaves, _ = pytree.tree_flatten(state)
    assert len(leaves) == 1
    assert leaves[0] is state


def test_several_and_keyword_inputs_with_one_given_whole(way: Any, checkpoint: str) -> None:
    class Attend(nn.Linear):
        def forward(self, x, y, *, mask, scale=1.0):
            return (super().forward(x) * y * mask * scale, y)

    class Two(nn.Module):
        def forward(self, x, y):
            return x + y

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output * target).sum()

    module = nn.Sequential(Attend(3, 3), Two(), nn.Tanh(), nn.Linear(3, 3))
    pipe = way.pipe(module, 3, checkpoint, balance=[1, 1, 1, 1], loss_fn=total, loss_reduction="sum")
    x, y = torch.randn(2, 7, 3, requires_grad=True).unbind()
    mask, target = torch.rand(1, 3, requires_grad=True), torch.randn(7, 3)
    attended = module[0](x, y, mask=mask, scale=2.0)
    total(module[2:](module[1](*attended)), target).backward()
    expected, mask.grad = mask.grad, None
    way.loss(pipe, (x, y), target, total, mask=NoChunk(mask), scale=2.0).backward()
    torch.testing.assert_close(mask.grad, expected)
    for a, b in zip(pipe.parameters(), held(module, pipe).parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


class Scaled(nn.Module):
    """The rows are in dimension 0 of one input, and in dimension 1 of another."""

    def forward(self, x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return x * scales.sum(0)[:, None]


def cut_by_hand(arguments: Any, keywords: Any, target: Any, chunks: int) -> list[Any]:
    cuts = (arguments[0].tensor_split(chunks), keywords["scales"].tensor_split(chunks, 1))
    targets = [None] * chunks if target is None else target.tensor_split(chunks)
    return [((x,), {"scales": scales}, part) for x, scales, part in zip(*cuts, targets, strict=True)]


@pytest.mark.filterwarnings("ignore:'scales' has the shape:pipework.PipeWarning")
@pytest.mark.parametrize("cut", ["marked", "learned", "by hand"])
def test_rows_in_another_dimension(way: Any, cut: str) -> None:
    def total(output: Any, target: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(list(output)) if isinstance(output, MicroBatches) else output
        return (joined * target).sum()

    module = nn.Sequential(Scaled(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    split = cut_by_hand if cut == "by hand" else None
    pipe = way.pipe(module, 3, balance=[1, 1, 1, 1], loss_fn=total, loss_reduction="sum", split=split)
    x, target = torch.randn(7, 3), torch.randn(7, 3)
    scales = torch.randn(4, 7, requires_grad=True)
    expected = scales.detach().clone().requires_grad_()
    for rows in torch.arange(7).tensor_split(3):
        total(module[1:](module[0](x[rows], expected[:, rows])), target[rows]).backward()
    given = Chunk(scales, dim=1) if cut == "marked" else scales
    way.loss(pipe, (x,), target, total, scales=given).backward()
    if pipe.is_first:
        assert torch.equal(scales.grad, expected.grad)
    for name, parameter in held(module, pipe).named_parameters():
        assert torch.equal(pipe.get_parameter(name).grad, parameter.grad), name


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
def test_a_mini_batch_that_failed_leaves_nothing_in_deferred_statistics(way: Any) -> None:
    class Sometimes(nn.Module):
        fail = False

        def forward(self, x):
            if self.fail:
                raise ArithmeticError
            return x

    def module() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.BatchNorm1d(2), Sometimes()).double()

    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6)
    pipe, plain = way.pipe(module(), 3, deferred_batch_norm=True, balance=[1, 1]), module()
    pipe[1].fail = True
    with pytest.raises(ArithmeticError):
        way.loss(pipe, x, y)
    pipe[1].fail = False
    way.loss(pipe, x, y)
    plain(x)
    torch.testing.assert_close(pipe[0].running_var, plain[0].running_var, rtol=1e-12, atol=0)
    assert pipe[0].num_batches_tracked == 1


class Neighbours(nn.Linear):
    """A layer of a graph network."""

    def forward(self, x: torch.Tensor, adjacency: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(adjacency, super().forward(x))


@pytest.mark.one_process("sparse tensors are not sent between processes")
@pytest.mark.filterwarnings("ignore:Sparse (CSR tensor|invariant checks):UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("given", [False, True])
def test_sparse_inputs_that_are_not_split(checkpoint: str, layout: torch.layout, given: bool) -> None:
    torch.manual_seed(0)
    module, x = nn.Sequential(Neighbours(3, 3), nn.Linear(3, 2)), torch.randn(6, 3)
    matrix = torch.randn(3, 3).relu().to_sparse(layout=layout).requires_grad_()
    expected = matrix.detach().clone().requires_grad_()
    for part in x.split(3):
        module[1](module[0](part, expected)).sum().backward()
    wanted = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    pipe = outside(module, 2, checkpoint, balance=[1, 1])
    inputs = (MicroBatches(x.split(3)), MicroBatches([matrix, matrix])) if given else (x, NoChunk(matrix))
    output = pipe(*inputs)
    (sum(part.sum() for part in output) if given else output.sum()).backward()
    assert all(map(torch.equal, wanted, [parameter.grad for parameter in pipe.parameters()]))
    torch.testing.assert_close(matrix.grad.to_dense(), expected.grad.to_dense())
