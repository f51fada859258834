"""Which parameters are put off, and what a layer may do meanwhile; the operators are in test_split_operators."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pipework.autograd.weight_split.store import WeightGradientAlias
from tests.autograd.weight_split.harness import Layer, Stage, check, check_module, leaves, plainly, same, seed, split

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def of(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = True) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_(grad)


def batches(*shape: int, count: int = 3, dtype: torch.dtype = torch.float32, grad: bool = True) -> list[list[Tensor]]:
    return [[of(*shape, dtype=dtype, grad=grad)] for _ in range(count)]


# Several uses

SEVERAL: dict[str, Layer] = {
    "twice, one after the other": lambda w, x: F.linear(F.linear(x, w).tanh(), w),
    "twice, side by side": lambda w, x: F.linear(x, w) * F.linear(x.sin(), w),
    "three times, one after the other": lambda w, x: F.linear(F.linear(F.linear(x, w).tanh(), w).tanh(), w),
    "three times, side by side": lambda w, x: F.linear(x, w) * (x.sin() @ w) + F.linear(x.cos(), w),
    "three times, in a fork": lambda w, x: (lambda y: F.linear(y, w) + torch.einsum("bi,ij->bj", y.exp(), w))(x @ w),
    "a detached graph twice": lambda w, x: torch.einsum("bi,ij->bj", x, w) + torch.addmm(x, x.sin(), w, beta=2),
}


@every_dtype
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", SEVERAL)
def test_a_parameter_used_several_times_is_summed_as_autograd_does(how: str, grad: bool, dtype: torch.dtype) -> None:
    check(SEVERAL[how], [of(7, 7, dtype=dtype)], batches(9, 7, dtype=dtype, grad=grad), waits=True)


@every_dtype
def test_a_parameter_used_by_another_operator_too_is_not_put_off(dtype: torch.dtype) -> None:
    check(lambda w, x: F.linear(x, w) * w.norm(), [of(7, 7, dtype=dtype)], batches(9, 7, dtype=dtype), waits=False)
    check(
        lambda w, b, x: F.linear(x, w) * w.norm() + F.linear(x, w, b),
        [of(7, 7, dtype=dtype), of(7, dtype=dtype)],
        batches(9, 7, dtype=dtype),
        waits=False,  # nor is the bias, which goes with the weight
    )


@every_dtype
def test_a_weight_tied_between_embedding_and_output(dtype: torch.dtype) -> None:
    def layer(weight: Tensor, indices: Tensor) -> Tensor:
        return F.linear(F.embedding(indices, weight).tanh(), weight)

    check(layer, [of(11, 5, dtype=dtype)], [[torch.randint(0, 11, (3, 4))] for _ in range(3)], waits=True)


class Changing:
    """Uses its parameter in another way from some micro-batch on."""

    def __init__(self, other: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._calls, self._other = -1, other

    def __call__(self, weight: Tensor, x: Tensor) -> Tensor:
        self._calls = (self._calls + 1) % 4
        return F.linear(x, weight) if self._calls != 2 else self._other(weight, x)


@every_dtype
@pytest.mark.parametrize(
    "other",
    [
        lambda w, x: x * w.sum(),
        lambda w, x: F.linear(x, w) * w.norm(),
        lambda w, x: x @ (w * 2) + F.linear(x, w),
        lambda w, x: x * 2,
    ],
)
def test_a_use_that_changes_later(other: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    layer, parameters, inputs = Changing(other), [of(7, 7, dtype=dtype)], batches(9, 7, count=4, dtype=dtype)
    expected, actual = plainly(layer, parameters, inputs), split(layer, parameters, inputs)
    same(actual.of_parameters, expected.of_parameters)
    same(actual.of_inputs, expected.of_inputs)


def test_what_turns_out_not_to_wait_gets_a_plain_alias_next_time() -> None:
    layer = Changing(lambda w, x: F.linear(x, w) * w.norm())
    parameters = [of(3, 3), of(3, 3), of(3)]
    stage = Stage(parameters)
    for number in range(3):
        stage.forward(number, lambda w, v, b, x: layer(w, x) + F.linear(x, v) * b, [of(2, 3)])
    stage.weight_store.learn(parameters, stage.aliases)
    assert [stage.weight_store.known(p) for p in parameters] == [False, True, False]


def test_the_next_mini_batch_puts_off_from_its_first_micro_batch_on() -> None:
    known: dict[int, bool] = {}
    parameters = [of(3, 3)]
    waiting = []
    for _ in range(2):
        stage = Stage(parameters, known)
        for number in range(2):
            output = stage.forward(number, lambda w, x: F.linear(x, w), [of(2, 3)])
            stage.input_half(number, output)
            waiting.append(bool(stage.weight_store.kept(number)))
            stage.weight_half(number)
        stage.weight_store.learn(parameters, stage.aliases)
    assert waiting == [False, True, True, True]


@pytest.mark.parametrize("thawed", [0, 1])
def test_a_parameter_goes_on_waiting_beside_one_that_is_thawed(thawed: int) -> None:
    known: dict[int, bool] = {}
    parameters = [of(3, 3), of(3, 3)]
    for mini_batch in range(3):
        parameters[thawed].requires_grad_(mini_batch > 0)
        stage = Stage(parameters, known)
        for number in range(2):
            output = stage.forward(number, lambda v, w, x: torch.einsum("ij,kj,lk->il", x, v, w), [of(2, 3)])
            stage.both_halves(number, output)
        trained = [n for n in (0, 1) if parameters[n].requires_grad]
        stage.weight_store.learn([parameters[n] for n in trained], [stage.aliases[n] for n in trained])
        assert [stage.weight_store.known(parameters[n]) for n in trained] == [True] * len(trained)


def test_reading_is_no_use() -> None:
    def layer(weight: Tensor, x: Tensor) -> Tensor:
        assert weight.shape == (3, 3)
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight.dim() == 2
        scale = weight.detach().abs().max()
        with torch.no_grad():
            scale = scale + F.linear(x, weight).sum() + weight.norm() + weight.data.sum()
        assert not scale.requires_grad
        assert type(weight.detach()) is Tensor
        return F.linear(x, weight) / scale

    check(layer, [of(3, 3)], batches(2, 3), waits=True)


def test_a_parameter_that_is_not_used_gets_no_gradient() -> None:
    check(lambda w, v, x: F.linear(x, w), [of(3, 3), of(3, 3)], batches(2, 3), waits=[True, None])


def test_an_output_that_nobody_differentiates() -> None:
    def layer(weight: Tensor, other: Tensor, x: Tensor) -> Tensor:
        F.linear(x, other)
        return F.linear(x, weight)

    run = check(layer, [of(3, 3), of(3, 3)], batches(2, 3), waits=True)
    assert run.of_parameters[1] is None


# What the user does with tensors meanwhile


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["before", "after"])
def test_hooks_on_the_output_change_the_parameters_gradient(how: str, grad: bool) -> None:
    def layer(weight: Tensor, x: Tensor) -> Tensor:
        y = F.linear(x, weight)
        if how == "before":
            y.register_hook(lambda gradient: gradient * 3)
        y.relu_()
        if how == "after":
            y.register_hook(lambda gradient: gradient * 3)
        return y

    check(layer, [of(3, 3)], batches(2, 3, grad=grad), waits=True)


@pytest.mark.parametrize("grad", [True, False])
def test_the_output_may_be_overwritten(grad: bool) -> None:
    check(lambda w, x: F.linear(x, w).mul_(2).relu_(), [of(3, 3)], batches(2, 3, grad=grad), waits=True)
    check(lambda w, x: torch.einsum("bi,ij->bj", x, w).relu_(), [of(3, 3)], batches(2, 3, grad=grad), waits=True)
    check(lambda w, i: F.embedding(i, w).mul_(2), [of(3, 3)], [[torch.tensor([1, 2, 1])]] * 3, waits=True)


@pytest.mark.parametrize("operator", [F.linear, torch.matmul, lambda x, w: torch.einsum("bi,ij->bj", x, w)])
@pytest.mark.parametrize("grad", [True, False])
def test_overwriting_the_input_is_an_error(operator: Callable[[Tensor, Tensor], Tensor], grad: bool) -> None:
    stage = Stage([of(3, 3)])
    for number in range(2):
        x = of(2, 3, grad=grad)
        hidden = x * 1
        output = stage.forward(number, lambda w, y: operator(y, w), [hidden])
        hidden.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stage.both_halves(number, output)


def test_overwriting_the_parameter_is_an_error() -> None:
    parameter = of(3, 3)
    stage = Stage([parameter])
    for number in range(2):
        output = stage.forward(number, lambda w, x: F.linear(x, w), [of(2, 3)])
        with torch.no_grad():
            parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            stage.input_half(number, output)


def test_saved_tensors_hooks_see_what_is_kept() -> None:
    packed: list[Tensor] = []
    unpacked: list[int] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor)
        return len(packed) - 1

    def unpack(number: int) -> Tensor:
        unpacked.append(number)
        return packed[number]

    def layer(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return F.linear(x, weight, bias)

    check(layer, [of(3, 3), of(3)], batches(2, 3, grad=False), waits=True)
    assert len(packed) == len(unpacked) == 6
    check(lambda w, b, x: layer(w, b, x).tanh(), [of(3, 3), of(3)], batches(2, 3), waits=True)
    assert sorted(unpacked) == list(range(len(packed)))

    def unpacked_once(weight: Tensor, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return torch.einsum("bi,ij->bj", x, weight)

    check(unpacked_once, [of(3, 3)], batches(2, 3), waits=False)
    assert sorted(unpacked) == list(range(len(packed)))


@pytest.mark.parametrize("operator", [F.linear, lambda x, w: torch.einsum("bi,ji->bj", x, w)])
def test_a_retained_graph_can_be_run_twice(operator: Callable[[Tensor, Tensor], Tensor]) -> None:
    weight, inputs = of(3, 3), [of(2, 3) for _ in range(3)]
    stage = Stage(leaves([weight]))
    outputs = [stage.forward(n, lambda w, x: operator(x, w), [x]) for n, x in enumerate(inputs)]
    for again in (True, False):
        for number, output in enumerate(outputs):
            stage.input_half(number, output, again=again)
            stage.weight_half(number, again=again)
    (own,) = leaves([weight])
    for _ in range(2):
        for number, x in enumerate(inputs):
            output = operator(x, own)
            output.backward(seed(output, number))
    same([stage.aliases[0].grad], [own.grad])


# Autocast


def autocast(layer: Layer) -> Layer:
    def inside(*values: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(*values)

    return inside


AUTOCAST: dict[str, tuple[Layer, tuple[int, ...]]] = {
    "linear": (lambda w, x: F.linear(x, w), (4, 4)),
    "of something computed": (lambda w, x: F.linear(x * 1, w), (4, 4)),
    "of a leaf, twice": (lambda w, x: F.linear(x, w) + F.linear(x, w), (4, 4)),
    "of a leaf, in two ways": (lambda w, x: F.linear(x, w) + x @ torch.ones(4, 4), (4, 4)),
    "three times": (lambda w, x: F.linear(F.linear(F.linear(x, w).tanh(), w).tanh(), w), (4, 4)),
    "matmul": (lambda w, x: x @ w, (4, 4)),
    "addmm": (lambda w, x: torch.addmm(x[0], x, w), (4, 4)),
    "conv": (lambda w, x: F.conv1d(x[None] * 1, w), (2, 5, 3)),
    "conv of a leaf": (lambda w, x: F.conv1d(x[None], w), (2, 5, 3)),
    "conv twice": (lambda w, x: F.conv1d(x[None], w) + F.conv1d(x[None].sin(), w), (2, 5, 3)),
    "padding": (lambda w, x: F.conv1d(x[None], w, padding="same"), (2, 5, 3)),
    "einsum": (lambda w, x: torch.einsum("bi,ij->bj", x, w), (4, 4)),
    "einsum twice": (lambda w, x: torch.einsum("bi,ij->bj", torch.einsum("bi,ij->bj", x, w), w), (4, 4)),
    "bmm": (lambda w, x: torch.bmm(x[None], w), (1, 4, 4)),
    "bmm twice": (lambda w, x: torch.bmm(torch.bmm(x[None] * 1, w), w) + torch.bmm(x[None] * 2, w), (1, 4, 4)),
    "embedding": (lambda w, x: F.embedding(x[:, 0].long().abs() % 4, w), (4, 4)),
    "tied": (lambda w, x: F.linear(F.embedding(x[:, 0].long().abs() % 4, w), w), (4, 4)),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", AUTOCAST)
def test_under_autocast(how: str, grad: bool) -> None:
    layer, shape = AUTOCAST[how]
    check(autocast(layer), [of(*shape)], batches(5, 4, grad=grad), waits=True)


def test_autocast_makes_one_copy_of_a_parameter_in_a_mini_batch() -> None:
    stage = Stage([of(3, 3), of(3)])
    (weight, bias) = stage.aliases
    assert isinstance(weight, WeightGradientAlias)
    assert isinstance(bias, WeightGradientAlias)
    copies = []
    for number in range(3):
        output = stage.forward(number, autocast(lambda w, b, x: F.linear(x, w, b)), [of(2, 3)])
        assert output.dtype == torch.bfloat16
        copies.append(weight.casts.get(torch.bfloat16))
        stage.input_half(number, output)
        stage.weight_half(number)
    assert copies[0] is None
    assert copies[1] is copies[2] is not None
    assert weight.casts.keys() == bias.casts.keys() == {torch.bfloat16}


# Modules


def test_self_attention_is_put_off_as_a_whole() -> None:
    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x)[0]

    check_module(Alone(), batches(3, 5, 8), waits=True)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
    check_module(layer, batches(3, 5, 8), waits={name: "norm" not in name for name, _ in layer.named_parameters()})


def test_cross_attention_is_put_off_in_part() -> None:
    inputs = [[of(3, 5, 8), (memory := of(3, 7, 8)), memory] for _ in range(3)]
    names = {name: name.startswith("out") for name, _ in nn.MultiheadAttention(8, 2).named_parameters()}
    check_module(nn.MultiheadAttention(8, 2, batch_first=True), inputs, waits=names)


# Functions around layers


@every_dtype
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inner", ["linear", "einsum", "both", "whole"])
def test_checkpoint_without_reentry(inner: str, grad: bool, dtype: torch.dtype) -> None:
    def block(x: Tensor, weight: Tensor) -> Tensor:
        if inner in ("linear", "both"):
            x = F.linear(x.sin(), weight).tanh()
        if inner in ("einsum", "both"):
            x = torch.einsum("bi,ij->bj", x, weight).tanh()
        if inner == "whole":
            x = x * weight.sum()
        return F.linear(x, weight)

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        return checkpoint(block, x, weight, use_reentrant=False) * 2  # type: ignore[no-any-return]

    waits = inner == "linear"
    check(layer, [of(4, 4, dtype=dtype)], batches(3, 4, grad=grad, dtype=dtype), waits=waits)


TRANSFORMS: dict[str, Layer] = {
    "vmap": lambda w, x: torch.func.vmap(lambda row: F.linear(row, w))(x),
    "vmap over the parameter": lambda w, x: torch.func.vmap(lambda v: x @ v, in_dims=0)(w),
    "grad": lambda w, x: torch.func.grad(lambda y: F.linear(y, w).square().sum())(x),
    "grad of the parameter": lambda w, x: x @ torch.func.grad(lambda v: F.linear(x, v).square().sum())(w),
    "jacrev": lambda w, x: torch.func.jacrev(lambda y: F.linear(y, w).tanh())(x[0]),
    "jvp": lambda w, x: torch.func.jvp(lambda y: F.linear(y, w).tanh(), (x,), (x.cos(),))[1],
    "functional_call": lambda w, x: torch.func.functional_call(nn.Linear(4, 4, bias=False), {"weight": w}, (x,)),
}


@pytest.mark.parametrize("how", TRANSFORMS)
def test_transforms(how: str) -> None:
    # PyTorch does not ask when a transform takes a parameter as its own argument.
    waits = {"functional_call": True, "vmap over the parameter": None, "grad of the parameter": None}.get(how, False)
    check(TRANSFORMS[how], [of(4, 4)], batches(3, 4), waits=[waits])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


def test_functions_of_the_user() -> None:
    check(lambda w, x: F.linear(x, Doubled.apply(w)), [of(4, 4)], batches(3, 4), waits=[None])
    layer, parameters, inputs = lambda w, x: F.linear(x, w) @ Doubled.apply(w), [of(4, 4)], batches(3, 4)
    expected, actual = plainly(layer, parameters, inputs), split(layer, parameters, inputs)
    torch.testing.assert_close(actual.of_parameters, expected.of_parameters)
