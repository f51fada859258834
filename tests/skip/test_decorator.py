import copy
import dataclasses
import inspect
import io
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


@skippable(stash=["x"])
class StashUndeclared(nn.Module):
    def forward(self, x):
        yield stash("y", x)


@skippable(pop=["x"])
class PopUndeclared(nn.Module):
    def forward(self, x):
        yield pop("y")


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
        @skippable(stash=["alice", "bob"])
        class Begin(nn.Module):
            def forward(self, x):
                yield stash("alice", x + 1)
                yield stash("bob", x + 2)
                return x

        @skippable(pop=["bob"], stash=["carol"])
        class Middle(nn.Module):
            def forward(self, x):
                bob = yield pop("bob")
                yield stash("carol", bob * 10)
                return x * bob

        @skippable(pop=["alice", "carol"])
        class End(nn.Module):
            def forward(self, x):
                carol = yield pop("carol")
                alice = yield pop("alice")
                return x, alice, carol

        assert nn.Sequential(Begin(), Middle(), End())(torch.tensor(3)) == (15, 4, 50)

    def test_none_is_passed_on(self):
        @skippable(stash=["x"])
        class Nothing(nn.Module):
            def forward(self, x):
                yield stash("x", None)
                return x

        @skippable(pop=["x"])
        class WhatIsIt(nn.Module):
            def forward(self, x):
                return (yield pop("x"))

        assert nn.Sequential(Nothing(), WhatIsIt())(torch.ones(1)) is None

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


class TestErrors:
    def failing(self, error, message, layer):
        with pytest.raises(error) as caught:
            layer(torch.zeros(2))
        assert str(caught.value) == message
        return caught.value

    @pytest.mark.parametrize("generator", [False, True])
    def test_declared_but_not_done(self, generator):
        class Idle(nn.Module):
            def forward(self, x):
                return x

        class IdleGenerator(nn.Module):
            def forward(self, x):
                return x
                yield

        idle = IdleGenerator if generator else Idle
        self.failing(RuntimeError, "'x' must be stashed but have not", skippable(stash=["x"])(idle)())
        self.failing(RuntimeError, "'x' must be popped but have not", skippable(pop=["x"])(idle)())
        self.failing(RuntimeError, "'x', 'y' must be stashed but have not", skippable(["x", "y"], ["z"])(idle)())

    def test_not_declared_and_not_stashed(self):
        self.failing(RuntimeError, "'y' has not been declared as stashable", StashUndeclared())
        self.failing(RuntimeError, "'y' has not been declared as poppable", PopUndeclared())
        self.failing(RuntimeError, "'identity' has not been stashed", Join())

    def test_a_second_pop_without_verify_skippables(self):
        model = nn.Sequential(Fork(2), Join(), Join())
        error = self.failing(RuntimeError, "'identity' has not been stashed", model)
        assert "verify_skippables(model) once" in error.__notes__[0]

        verify_skippables(model)  # then the advice is of no use
        assert not hasattr(self.failing(RuntimeError, "'identity' has not been stashed", model[1]), "__notes__")

    def test_not_a_command(self):
        class Five(nn.Module):
            def forward(self, x):
                yield 5

        self.failing(TypeError, "5 is not a command from @skippable", skippable(stash=["x"])(Five)())
        self.failing(TypeError, "5 is not a command from @skippable", skippable()(Five)())

    def test_twice_in_one_layer(self):
        @skippable(stash=["x"])
        class Twice(nn.Module):
            def forward(self, x):
                yield stash("x", x)
                yield stash("x", x)

        @skippable(pop=["x"])
        class TwicePop(nn.Module):
            def forward(self, x):
                yield pop("x")
                yield pop("x")

        self.failing(RuntimeError, "'x' has already been stashed by this layer", Twice())
        self.failing(RuntimeError, "'x' has already been popped by this layer", TwicePop())

    def test_only_tensors_can_be_stashed(self):
        @skippable(stash=["x"])
        class StashList(nn.Module):
            def forward(self, x):
                yield stash("x", [x])

        self.failing(TypeError, "'x' must be stashed as a tensor or None, not as list", StashList())

    def test_a_string_is_no_list_of_names(self):
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
        assert type(loaded[0].module) is Fork.module_class
        assert torch.equal(loaded(x), model(x))

    def test_can_be_saved_and_nested_in_a_class(self):
        file = io.BytesIO()
        torch.save(Outer.Nested(), file)
        file.seek(0)
        assert type(torch.load(file, weights_only=False)) is Outer.Nested

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
