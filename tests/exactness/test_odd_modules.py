"""Modules that do what few modules do: return one tensor twice, stand in two stages, be a pipe themselves."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from pipework import NoChunk, Pipe, PipeSequential, pop, skippable, stash
from pipework.model.batchnorm import DeferredBatchNorm
from tests.conftest import WAYS
from tests.ranks import held

CHECKPOINT_MODES = ("never", "except_last", "always")


def in_two(module: nn.Sequential, checkpoint: str = "except_last", chunks: int = 2) -> Pipe:
    return WAYS["outside"].pipe(module, chunks, checkpoint, balance=[1, len(module) - 1], share=True)


def assert_same_gradients(actual: Pipe, expected: nn.Module) -> None:
    for a, b in zip(actual.parameters(), held(expected, actual).parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


# Tensors that share memory


class Returns(nn.Module):
    """Returns what a function makes of a linear layer's output."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self.linear(x))


class Takes(nn.Module):
    """Returns what a function makes of two tensors."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.function(a, b)


def overwrite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a.mul_(2), b * b], dim=1)


def join(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.cat([a, b * b], dim=1)


def twice(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y


def with_a_view(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y[:, :2]


def halves(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y[:, :2], y[:, 2:]


@pytest.mark.parametrize("balance", [[2], [1, 1]])
@pytest.mark.parametrize(
    ("function", "receiver"), [(twice, overwrite), (twice, join), (with_a_view, join), (halves, overwrite)]
)
def test_outputs_that_share_memory(function: object, receiver: object, balance: list[int], checkpoint: str) -> None:
    plain = PipeSequential(Returns(function), Takes(receiver)).double()
    pipe = WAYS["outside"].pipe(plain, 3, checkpoint, balance=balance)
    for _ in range(2):
        x = torch.randn(6, 4, dtype=torch.float64)
        expected, output = plain(x), pipe(x)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-15)
        expected.square().sum().backward()
        output.square().sum().backward()
        assert_same_gradients(pipe, plain)


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
def test_overwriting_one_of_two_outputs_that_overlap_is_refused(checkpoint: str) -> None:
    pipe = in_two(PipeSequential(Returns(with_a_view), Takes(overwrite)), checkpoint)
    with pytest.raises(RuntimeError, match="share memory"):
        pipe(torch.randn(4, 4)).sum().backward()
    assert all(isinstance(parameter, nn.Parameter) for parameter in pipe.parameters())


def with_itself_detached(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y, y.detach()


def overwrite_detached(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    square = a * a
    b.add_(1.0)
    return square


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
def test_overwriting_a_detached_output_of_the_same_memory_is_refused(checkpoint: str) -> None:
    """As by autograd, if one layer does both."""
    pipe = in_two(PipeSequential(Returns(with_itself_detached), Takes(overwrite_detached)), checkpoint)
    with pytest.raises(RuntimeError, match="share memory"):
        pipe(torch.randn(4, 4)).sum().backward()


def with_one_of_inference_mode(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode():
        return y, torch.ones_like(y)


@pytest.mark.parametrize(
    ("given", "function"),
    [
        (lambda y: (y, torch.ones_like(y)), lambda a, b: a * a * b.mul_(2.0)),
        # Then it is a leaf no longer, and its gradient here has other strides.
        (lambda y: (y, torch.ones_like(y)), lambda a, b: b.add_(a * a).sum(1)),
        (with_one_of_inference_mode, lambda a, b: a * a + b),  # PyTorch does not count its changes
    ],
)
def test_an_output_may_need_no_gradient(checkpoint: str, given: Any, function: Any) -> None:
    plain, x = PipeSequential(Returns(given), Takes(function)).double(), torch.randn(4, 4, dtype=torch.float64)
    pipe = in_two(copy.deepcopy(plain), checkpoint)
    for model in (plain, pipe):
        model(x).square().sum().backward()
    assert_same_gradients(pipe, plain)


def without_gradients() -> nn.Sequential:
    return PipeSequential(Returns(with_a_view).requires_grad_(False), Takes(overwrite), nn.Linear(6, 1))


def test_without_gradients_they_may_be_overwritten() -> None:
    plain, x = without_gradients(), torch.randn(4, 4)
    expected = torch.cat([plain(x[:2]), plain(x[2:])])
    assert torch.equal(in_two(plain, "never")(x), expected)


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES[1:])
def test_they_may_not_be_overwritten_if_they_are_copied_for_a_recomputation(checkpoint: str) -> None:
    with pytest.raises(RuntimeError, match="share memory"):
        in_two(without_gradients(), checkpoint)(torch.randn(4, 4))


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_overwriting_an_input_whose_elements_share_memory_is_refused(checkpoint: str) -> None:
    def overwrite_first(windows: torch.Tensor) -> torch.Tensor:
        windows[..., 0] *= 2
        return windows.sum(2)

    takes = PipeSequential(Returns(lambda y: y.unfold(1, 3, 1)), nn.Identity())
    takes[1].forward = overwrite_first
    with pytest.raises(RuntimeError, match="whose elements share memory"):
        in_two(takes, checkpoint)(torch.randn(4, 4)).sum().backward()


# Hooks that layers register on what they are given


def halve(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: gradient / 2)


class Halves(nn.Module):
    """Halves the gradient of its inputs with hooks."""

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        halve(*inputs)
        return torch.sin(sum(inputs))


class HalvesNested(nn.Module):
    def forward(self, value: dict[str, torch.Tensor]) -> torch.Tensor:
        halve(value["a"], value["b"])
        return value["a"] * value["b"]


@skippable(stash=["halved"])
class Stashes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        yield stash("halved", x.cos())
        return x


@skippable(pop=["halved"])
class HalvesPopped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        popped = yield pop("halved")
        halve(popped)
        return x * popped


HOOKED = {
    "input": lambda: [nn.Linear(4, 4), Halves(), nn.Linear(4, 4)],
    "several inputs": lambda: [Returns(lambda y: (y.sin(), y.cos())), Halves(), nn.Linear(4, 4)],
    "nested": lambda: [Returns(lambda y: {"a": y.sin(), "b": y.cos()}), HalvesNested(), nn.Linear(4, 4)],
    "popped": lambda: [Stashes(), nn.Linear(4, 4), HalvesPopped()],
}


@pytest.mark.parametrize("name", HOOKED)
def test_a_hook_at_the_beginning_of_a_stage_acts_once(
    way: Any, name: str, checkpoint: str, assert_trained_alike: Callable[..., None]
) -> None:
    plain = PipeSequential(nn.Linear(4, 4), *HOOKED[name]())
    pipe = way.pipe(plain, 4, checkpoint, balance=[1] * 4)
    assert_trained_alike(plain, pipe, [(torch.randn(8, 4),)], way=way)


@pytest.mark.one_process("between processes inputs get no gradient back")
def test_a_hook_on_the_inputs_of_a_pipe_acts_once_for_each_micro_batch(checkpoint: str) -> None:
    x, mask = torch.randn(8, 4).double(), torch.randn(4).double()
    own = [each.clone().requires_grad_() for each in (x, mask)]
    pipe = in_two(nn.Sequential(Halves(), nn.Linear(4, 4)).double(), checkpoint, chunks=4)
    output = pipe(own[0] * 1, NoChunk(own[1]))
    for _ in range(2):
        output.sum().backward(retain_graph=True)
    expected = [each.clone().requires_grad_() for each in (x, mask)]
    pipe[1](torch.sin(expected[0] + expected[1])).sum().backward()
    for actual, whole in zip(own, expected, strict=True):
        torch.testing.assert_close(actual.grad, whole.grad, rtol=1e-12, atol=1e-15)  # twice the half


# Opaque objects


OPAQUE = {
    "distribution": (lambda y: torch.distributions.Normal(y, 1.0), r"(?s)Normal.*register_pytree_node"),
    "set": (lambda y: {y}, r"type set holds .* \(among its elements\)"),
    "dict_values": (lambda y: {"y": y}.values(), r"type dict_values holds .* \(among its elements\)"),
    "closure": (lambda y: lambda: y, r"type function holds .* \(in its closure\)"),
    "default": (lambda y: lambda z=y: z, r"type function holds .* \(among its defaults\)"),
    "partial": (lambda y: functools.partial(torch.add, y), r"type functools.partial holds .* \(among its arguments\)"),
    "method": (lambda y: y.relu, r"type builtin_function_or_method holds .* \(as its object\)"),
    "generator": (lambda y: (each for each in [y]), "type generator yields what it holds only when it is read"),
    "iterator": (lambda y: iter([y]), r"type list_iterator holds .* \(among its elements\)"),
}


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("kind", OPAQUE)
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_the_layer_that_hides_a_gradient_is_named(kind: str, checkpoint: str) -> None:
    hide, words = OPAQUE[kind]
    pipe = in_two(nn.Sequential(Returns(lambda y: (y, hide(y))), nn.Linear(4, 4)), checkpoint)
    with pytest.raises(TypeError, match=words) as caught:
        pipe(torch.randn(4, 4))
    assert caught.value.__notes__[0] == "pipework: returned by layer '0' (Returns)"


@pytest.mark.one_process("functions cannot travel")
def test_sets_and_functions_without_a_gradient_are_plain_values() -> None:
    class Apply(nn.Module):
        def forward(self, y: torch.Tensor, names: set[str], function: Callable[[torch.Tensor], torch.Tensor]) -> object:
            return function(y) * len(names)

    factor = torch.tensor(3.0)
    give = Returns(lambda y: (y, {"a", "b"}, lambda z: z * factor))
    module, x = nn.Sequential(give, Apply()), torch.randn(4, 4)
    pipe = in_two(module, "always")
    torch.testing.assert_close(pipe(x), module[1](*module[0](x)))
    with torch.no_grad():
        # Nothing can be lost.
        assert len(in_two(nn.Sequential(nn.Identity(), Returns(lambda y: iter([y]))))(x)) == 2
        given = in_two(nn.Sequential(nn.Linear(4, 4), Returns(lambda y: torch.distributions.Normal(y, 1.0))))(x)
    assert [type(part) for part in given] == [torch.distributions.Normal] * 2


# Containers that are more than their layers


class Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x


class Named(nn.Sequential):
    """A name for a sequence, and nothing else."""


# What is done with a container of two linear layers.
CONTAINERS: dict[str, Callable[[Any], object]] = {
    "forward": lambda module: setattr(module, "__class__", Residual),
    "parameter": lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))),
    "buffer": lambda module: module.register_buffer("scale", torch.ones(1)),
    "hook": lambda module: module.register_forward_hook(lambda module, inputs, output: output * 2),
    "hook before": lambda module: module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,)),
}


@pytest.mark.one_process("nothing is computed")
@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_container_that_would_lose_something_is_refused(kind: str) -> None:
    container = Named(nn.Linear(4, 4), nn.Linear(4, 4))
    CONTAINERS[kind](container)
    with pytest.raises(TypeError, match="wrap it as one layer"):
        in_two(container)


@pytest.mark.parametrize("container", [Named, PipeSequential])
def test_a_container_that_adds_nothing_is_taken_apart(container: type[nn.Sequential]) -> None:
    module = container(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(4, 4)
    expected = module(x)
    torch.testing.assert_close(in_two(module)(x), expected)


# Pipes in pipes


@pytest.mark.one_process("pipes in pipes")
@pytest.mark.parametrize(("inner", "outer"), [("always", "never"), ("always", "always"), ("never", "never")])
def test_a_pipe_may_be_a_layer_of_another(inner: str, outer: str) -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).double()
    module = copy.deepcopy(plain)
    pipe = in_two(nn.Sequential(module[0], in_two(module[1], inner)), outer)
    parameters = list(pipe.parameters())
    for _ in range(2):
        x = torch.randn(8, 4, dtype=torch.float64)
        plain(x).square().sum().backward()
        pipe(x).square().sum().backward()
        assert_same_gradients(pipe, plain)
        assert all(a is b for a, b in zip(pipe.parameters(), parameters, strict=True))


# A module that two stages run


class Remembers(nn.Module):
    """Assigns an attribute and a buffer, which for rows of 0, 10 and 20 is 20 in the first stage, 21 in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("newest", torch.zeros(()))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        self.newest = x.detach().mean()
        return x * self.gain + 1


def test_what_a_shared_module_assigns_is_found_on_the_users_module(checkpoint: str) -> None:
    shared = Remembers()
    pipe = in_two(nn.Sequential(shared, shared), checkpoint, chunks=3)
    x = torch.tensor([[0.0], [10.0], [20.0]])
    earlier = 0
    for _ in range(2):
        loss = pipe(x).sum()
        assert shared.calls > earlier
        assert shared.newest.item() in (20, 21)
        loss.backward()
        assert shared.newest.item() in (20, 21)
        earlier = shared.calls
        shared.newest = torch.zeros(())
    assert isinstance(shared.gain, nn.Parameter)


@pytest.mark.one_process("watches what all layers do, in one process")
def test_what_the_user_or_one_stage_alone_has_changed_is_not_undone() -> None:
    class NotesLong(nn.Module):
        long = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 4:
                self.long = self.long + 1
            return x * 1

    shared = NotesLong()
    pipe = Pipe(nn.Sequential(shared, nn.Linear(8, 2), shared), 2, "always", balance=[1, 2], devices=["cpu"] * 2)
    loss = pipe(torch.randn(4, 8, requires_grad=True)).sum()  # so that the first stage is recomputed, too
    assert shared.long == 2
    pipe.eval()
    shared.note = "mine"
    loss.backward()
    assert shared.long == 4
    assert shared.note == "mine"
    assert not shared.training


@pytest.mark.one_process("changes or looks at layers by their position")
def test_a_child_of_a_shared_module_may_be_replaced() -> None:
    shared = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    module = nn.Sequential(shared, nn.Linear(4, 4), shared)
    pipe, x = in_two(module), torch.randn(6, 4)
    for child in (nn.Linear(4, 4), nn.Sequential(), nn.Sequential(nn.Linear(4, 4))):
        torch.testing.assert_close(pipe(x), module(x))
        shared[0] = child
        shared.add_module("2", nn.Sigmoid())
        torch.testing.assert_close(pipe(x), module(x))
    pipe(x).sum().backward()
    assert shared[0][0].weight.grad is not None


@pytest.mark.one_process("nothing is computed")
@pytest.mark.parametrize("wrap", [lambda norm: norm, lambda norm: nn.Sequential(nn.Linear(4, 4), norm)])
def test_a_batch_norm_in_two_partitions_is_refused(wrap: object) -> None:
    shared = wrap(nn.BatchNorm1d(4))
    module = nn.Sequential(shared, nn.Linear(4, 4), shared)
    names = "'0' and '2'" if isinstance(shared, nn.BatchNorm1d) else "'0.1' and '2.1'"
    with pytest.raises(ValueError, match=f"BatchNorm1d is used in 2 partitions, as {names}, .*put them into one part"):
        Pipe(module, 2, balance=[2, 1], devices=["cpu"] * 2)
    Pipe(module, 2, balance=[3], devices=["cpu"])(torch.randn(8, 4)).sum().backward()
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    Pipe(nn.Sequential(norm, nn.Linear(4, 4), norm), 2, balance=[2, 1], devices=["cpu"] * 2)


# A graph inside the graph


@pytest.mark.one_process("changes or looks at layers by their position")
def test_a_hook_fires_once_for_a_layer_under_pytorchs_reentrant_checkpoint(checkpoint: str) -> None:
    class Checkpointed(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch_checkpoint.checkpoint(super().forward, x, use_reentrant=True)

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    module = nn.Sequential(nn.Linear(4, 4), Checkpointed(4, 4)).double()
    module.load_state_dict(plain.state_dict())
    pipe = in_two(module, checkpoint, chunks=4)
    fired: list[torch.Tensor] = []
    pipe[1].weight.register_hook(lambda gradient: fired.append(gradient.clone()))
    pipe[1].weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(parameter.grad.clone()))
    x = torch.randn(8, 4, dtype=torch.float64)
    plain(x).square().sum().backward()
    pipe(x).square().sum().backward()
    assert len(fired) == 2
    for gradient in fired:
        torch.testing.assert_close(gradient, plain[1].weight.grad, rtol=1e-12, atol=1e-15)


# The pipe's own children


@pytest.mark.one_process("changes or looks at layers by their position")
@pytest.mark.parametrize("used", [True, False])
def test_a_layer_that_is_assigned_under_its_name_is_what_runs(used: bool) -> None:
    pipe = in_two(nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2))))
    x = torch.randn(6, 4)
    if used:
        assert pipe(x).shape == (6, 2)
    pipe.head = head = nn.Linear(4, 7)
    assert pipe(x).shape == (6, 7)
    pipe(x).sum().backward()
    assert head.weight.grad is not None
    assert [id(parameter) for parameter in pipe.parameters()] == [
        id(parameter) for layer in (pipe[0], head) for parameter in layer.parameters()
    ]
    assert pipe.head is pipe[1] is pipe.partitions[1][0] is head


@pytest.mark.one_process("changes or looks at layers by their position")
def test_a_module_under_a_new_name_is_refused() -> None:
    pipe = in_two(nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2))))
    with pytest.raises(AttributeError):
        pipe.tail = nn.Linear(2, 2)
    assert [name for name, _ in pipe.named_children()] == ["body", "head"]


@pytest.mark.one_process("changes or looks at layers by their position")
@pytest.mark.parametrize("used", [True, False])
@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
def test_a_layer_that_is_assigned_gets_deferred_batch_norms_too(make: object, used: bool) -> None:
    module = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 2))).double()
    whole = copy.deepcopy(module)
    pipe = Pipe(module, 3, deferred_batch_norm=True, balance=[1, 2], devices=["cpu"] * 2)
    if used:
        pipe(torch.randn(6, 4, dtype=torch.float64)).sum().backward()
    whole.norm = make().double()
    pipe.norm = copy.deepcopy(whole.norm)
    whole.body.load_state_dict(pipe.body.state_dict())
    for rows in (7, 6):
        x = torch.randn(rows, 4, dtype=torch.float64) + torch.arange(rows)[:, None]
        whole(x)
        pipe(x).sum().backward()
    (actual,) = [module for module in pipe.norm.modules() if isinstance(module, DeferredBatchNorm)]
    (expected,) = [module for module in whole.norm.modules() if isinstance(module, nn.BatchNorm1d)]
    for a, b in zip(actual.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.one_process("changes or looks at layers by their position")
@pytest.mark.parametrize("used", [True, False])
def test_a_layer_that_is_assigned_must_fit_to_the_others(used: bool) -> None:
    @skippable(stash=["late"])
    class Stash(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            yield stash("late", x)
            return x

    pipe = in_two(nn.Sequential(OrderedDict(norm=nn.BatchNorm1d(4), body=nn.Linear(4, 4), head=nn.Linear(4, 2))))
    x = torch.randn(6, 4)
    if used:
        pipe(x)
    pipe.body = Stash()
    with pytest.raises(TypeError, match="no module declared 'late' as poppable but stashed"):
        pipe(x)
    pipe.body = pipe.norm
    with pytest.raises(ValueError, match="put them into one partition"):
        pipe(x)
    for wrong in (None, torch.relu):
        with pytest.raises(TypeError, match="replaced by a module only"):
            pipe.body = wrong
    with pytest.raises(AttributeError, match="cannot be removed"):
        del pipe.body
    pipe.body = nn.Identity()
    assert pipe(x).shape == (6, 2)


# Inputs that are overwritten


def test_an_input_that_is_no_leaf_may_be_overwritten_beside_one_that_is(checkpoint: str) -> None:
    linear = nn.Linear(3, 4).double()
    pipe = in_two(PipeSequential(Takes(lambda a, b: a + b.mul_(2)), copy.deepcopy(linear)), checkpoint)
    leaf, source = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    expected = linear(leaf + source * 6)
    expected_gradients = torch.autograd.grad(expected.square().sum(), [leaf, source])
    output = pipe(leaf, source * 3)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-15)
    output.square().sum().backward()
    torch.testing.assert_close((leaf.grad, source.grad), expected_gradients, rtol=1e-12, atol=1e-15)


@pytest.mark.one_process("the meta device")
@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_a_model_without_data_tells_shapes(checkpoint: str) -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2))
    pipe = Pipe(module, 4, checkpoint, balance=[2, 2], devices=["meta"] * 2)
    output = pipe(torch.randn(10, 6, device="meta"))
    output.sum().backward()
    assert (output.shape, output.device.type) == ((10, 2), "meta")
    assert pipe[0].weight.grad.shape == (8, 6)
