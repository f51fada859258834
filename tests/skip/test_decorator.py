import copy
import dataclasses
import inspect
import itertools
import pickle

import pytest
import torch
from torch import nn

from pipework.model.sequential import TupleRule
from pipework.runtime.skips import skip_tracker
from pipework.skip import Namespace, Skippable, pop, skippable, stash, verify_skippables


@skippable(stash=["identity"])
class Fork(nn.Module):
    """Passes its input on, past what follows."""

    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        yield stash("identity", x)
        return self.linear(x)


@skippable(pop=["identity"])
class Join(nn.Module):
    def forward(self, x):
        identity = yield pop("identity")
        return x + identity


class Outer:
    @skippable(stash=["a"], pop=["b"])
    class Nested(nn.Module):
        def forward(self, x):
            yield stash("a", x)
            return x + (yield pop("b"))


def made(stash=(), pop=(), *commands, result=None):
    """A layer that yields commands, and returns its input, or what it makes of the input and of what it popped."""

    class Made(nn.Module):
        def forward(self, x):
            popped = []
            for command in commands:
                popped.append((yield command(x) if callable(command) else command))
            return x if result is None else result(x, *popped)

    return skippable(stash=stash, pop=pop)(Made)()


@pytest.fixture(autouse=True)
def own_tracker():
    """No test finds what another has left."""
    with skip_tracker.using(skip_tracker.LocalTracker()):
        yield


def raw(layer):
    """The module that the layer wraps."""
    return layer.module


def residual(fork, x):
    return raw(fork).linear(x) + x


class TestWithoutAPipe:
    def test_a_tensor_gets_past_the_layers_between(self):
        model = nn.Sequential(Fork(), nn.ReLU(), Join())
        x = torch.randn(2, 4, requires_grad=True)
        output = model(x)
        expected = raw(model[0]).linear(x).relu() + x
        assert torch.equal(output, expected)
        (gradient,) = torch.autograd.grad(output.sum(), x)
        assert torch.equal(gradient, torch.autograd.grad(expected.sum(), x)[0])

    def test_several_names_in_one_layer(self):
        begin = made(["alice", "bob"], (), lambda x: stash("alice", x + 1), lambda x: stash("bob", x + 2))
        middle = made(
            ["carol"], ["bob"], pop("bob"), lambda x: stash("carol", x * 10), result=lambda x, bob, _: x * bob
        )
        end = made((), ["alice", "carol"], pop("carol"), pop("alice"), result=lambda *values: values)
        assert nn.Sequential(begin, middle, end)(torch.tensor(3)) == (15, 30, 4)

    def test_none_is_passed_on(self):
        last = made((), ["x"], pop("x"), result=lambda x, popped: popped)
        assert nn.Sequential(made(["x"], (), stash("x", None)), last)(torch.ones(1)) is None

    def test_a_failed_run_leaves_nothing_that_matters(self):
        fork, join = Fork(), Join()
        fork(torch.zeros(2, 4))  # nobody pops this
        x = torch.randn(2, 4)
        assert torch.equal(join(fork(x)), residual(fork, x))
        with pytest.raises(KeyError):  # the tensor is gone after the pop
            skip_tracker.current().load((None, "identity"))

    def test_several_poppers_after_verify_skippables(self):
        model = nn.Sequential(Fork(), Join(), Join(), Join())
        verify_skippables(model)
        x = torch.randn(2, 4)
        for _ in range(2):
            assert torch.allclose(model(x), raw(model[0]).linear(x) + 3 * x)
        with pytest.raises(KeyError):  # kept until the last pop, and no longer
            skip_tracker.current().load((None, "identity"))


class Idle(nn.Module):
    """Is no generator."""

    def forward(self, x):
        return x


UNDONE = [
    ({"stash": ["x"]}, "'x' must be stashed but have not"),
    ({"pop": ["x"]}, "'x' must be popped but have not"),
    ({"stash": ["x", "y"], "pop": ["z"]}, "'x', 'y' must be stashed but have not"),
]
WRONG = [
    *((made(**names), RuntimeError, message) for names, message in UNDONE),
    *((skippable(**names)(Idle)(), RuntimeError, message) for names, message in UNDONE),
    (made(["x"], (), stash("y", None)), RuntimeError, "'y' has not been declared as stashable"),
    (made((), ["x"], pop("y")), RuntimeError, "'y' has not been declared as poppable"),
    (Join(), RuntimeError, "'identity' has not been stashed"),
    (made(["x"], (), 5), TypeError, "5 is not a command from @skippable"),
    (made((), (), 5), TypeError, "5 is not a command from @skippable"),
    (made(["x"], (), *[stash("x", None)] * 2), RuntimeError, "'x' has already been stashed by this layer"),
    (
        nn.Sequential(made(["x"], (), stash("x", None)), made((), ["x"], pop("x"), pop("x"))),
        RuntimeError,
        "'x' has already been popped by this layer",
    ),
    (made(["x"], (), stash("x", [1])), TypeError, "'x' must be stashed as a tensor or None, not as list"),
]


@pytest.mark.parametrize(("layer", "error", "message"), WRONG)
def test_errors(layer, error, message):
    with pytest.raises(error) as caught:
        layer(torch.zeros(2))
    assert str(caught.value) == message


def test_a_second_pop_without_verify_skippables():
    model = nn.Sequential(Fork(2), Join(), Join())
    with pytest.raises(RuntimeError, match="'identity' has not been stashed") as caught:
        model(torch.zeros(2))
    assert "verify_skippables(model) once" in caught.value.__notes__[0]
    verify_skippables(model)  # then the advice is of no use
    with pytest.raises(RuntimeError, match="'identity' has not been stashed") as caught:
        model[1](torch.zeros(2))
    assert not hasattr(caught.value, "__notes__")


def test_a_string_is_no_list_of_names():
    with pytest.raises(TypeError, match=r"^stash must be a list of names, .* 'skip': write \['skip'\]$"):
        skippable(stash="skip")
    with pytest.raises(TypeError, match=r"^pop must be a list of names"):
        skippable(pop="skip")


class TestIsolate:
    def test_the_same_name_twice(self):
        first, second = Namespace(), Namespace()
        model = nn.Sequential(
            Fork().isolate(first), Fork().isolate(second), Join().isolate(first), Join().isolate(second)
        )
        verify_skippables(model)
        x = torch.randn(2, 4)
        assert torch.equal(model(x), raw(model[1]).linear(y := raw(model[0]).linear(x)) + x + y)

    def test_only_some_names(self):
        inner, outer = Namespace(), Namespace()
        layer = Outer.Nested().isolate(inner, only=["a"])
        assert list(layer.stashed_keys()) == [(inner, "a")]
        assert list(layer.popped_keys()) == [(None, "b")]
        layer.isolate(outer, only=["b"])
        assert list(layer.stashed_keys()) == [(inner, "a")]
        assert list(layer.popped_keys()) == [(outer, "b")]
        layer.isolate(outer)
        assert list(layer.stashed_keys()) == [(outer, "a")]

    def test_what_is_not_declared(self):
        with pytest.raises(ValueError, match=r"^cannot isolate 'c': this layer declares 'a', 'b'$"):
            Outer.Nested().isolate(Namespace(), only=["a", "c"])
        with pytest.raises(TypeError, match=r"^only must be a list of names"):
            Outer.Nested().isolate(Namespace(), only="a")


class TestTheClass:
    def test_is_a_module_that_holds_the_users(self):
        layer = Fork(width=3)
        assert isinstance(layer, Skippable)
        assert isinstance(layer.module, Fork.module_class)
        assert [name for name, _ in layer.named_parameters()] == ["module.linear.weight", "module.linear.bias"]
        assert (Fork.__name__, Fork.__qualname__, Fork.__module__) == ("Fork", "Fork", __name__)
        assert Fork.__doc__ == "Passes its input on, past what follows."
        assert repr(layer) == f"@skippable({layer.module!r})"
        assert list(inspect.signature(layer.forward).parameters) == ["x"]
        assert TupleRule.BY_SIGNATURE.keeps_whole(layer)
        decorated = skippable(("b", "a", "b"), pop={"c": 1})(Bystander)
        assert (decorated.stashable_names, decorated.poppable_names) == (("b", "a"), ("c",))

    @pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
    def test_can_be_pickled(self, protocol):
        model = nn.Sequential(Fork(), nn.ReLU(), Join(), Join())
        namespace = Namespace()
        for layer in (model[0], model[2], model[3]):
            layer.isolate(namespace)
        verify_skippables(model)
        loaded = pickle.loads(pickle.dumps(model, protocol))
        x = torch.randn(2, 4)
        assert type(loaded[0]) is Fork
        assert type(pickle.loads(pickle.dumps(Outer.Nested(), protocol))) is Outer.Nested
        assert type(loaded[0].module) is Fork.module_class
        assert torch.equal(loaded(x), model(x))

    def test_an_undecorated_class_beside_it_keeps_its_pickle(self):
        decorated = skippable(stash=["x"])(Bystander)
        assert type(pickle.loads(pickle.dumps(Bystander()))) is Bystander
        assert decorated.module_class is Bystander

    def test_can_be_copied(self):
        model = nn.Sequential(Fork(), Join(), Join())
        verify_skippables(model)
        twin = copy.deepcopy(model)
        x = torch.randn(2, 4)
        assert torch.equal(twin(x), model(x))
        assert twin[0].module is not model[0].module
        twin[0].isolate(Namespace())
        assert list(model[0].stashed_keys()) == [(None, "identity")]


class Bystander(nn.Module):
    """A class that is decorated under another name, and used by itself as well."""


def test_without_parentheses():
    with pytest.raises(TypeError, match=r"class Layer was given as stash: write @skippable\(stash=\[...\], pop="):

        @skippable
        class Layer(nn.Module):
            pass


@pytest.mark.parametrize("command", [stash("a", None), pop("a")])
def test_commands_cannot_be_changed_and_equal_themselves_alone(command: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        command.name = "b"
    assert pop("a") != pop("a")  # comparing stashes would compare tensors element by element


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda namespace: pickle.loads(pickle.dumps(namespace))]
)
def test_namespaces_are_unique_and_ordered_and_equal_their_copies(duplicate) -> None:
    namespaces = [Namespace() for _ in range(10)]
    assert all(left < right for left, right in itertools.pairwise(sorted(namespaces)))
    assert {namespace: number for number, namespace in enumerate(namespaces)}[duplicate(namespaces[3])] == 3
    with pytest.raises(AttributeError):
        namespaces[0].identity = "another"
