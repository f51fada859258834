"""Skip connections under their old names: each tensor is popped by one layer."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

CHECKPOINT_MODES = ("never", "except_last", "always")


def stashing(skip: Any, name: str = "skip") -> nn.Module:
    class Stash(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield skip.stash(name, 3 * x)
            return torch.tanh(x)

    return skip.skippable(stash=[name])(Stash)()


def popping(skip: Any, name: str = "skip") -> nn.Module:
    class Pop(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x * (yield skip.pop(name))

    return skip.skippable(pop=[name])(Pop)()


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("balance", [[1, 1, 1], [2, 1], [3]], ids=str)
def test_a_tensor_reaches_the_layer_that_pops_it(adapter: Any, balance: list[int], checkpoint: str) -> None:
    skip = adapter.module("skip")
    module = nn.Sequential(stashing(skip), nn.Linear(2, 2), popping(skip))
    pipe = adapter.pipe(module, balance, 2, checkpoint)
    assert list(pipe.state_dict()) == [f"partitions.{int(balance[0] == 1)}.1.{name}" for name in ("weight", "bias")]
    x, y = (torch.linspace(-1, 1, 8).view(4, 2).requires_grad_() for _ in range(2))
    output = pipe(x)
    output.sum().backward()
    expected = module(y)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(x.grad, torch.autograd.grad(expected.sum(), y)[0])


def test_namespaces_keep_equal_names_apart(adapter: Any) -> None:
    skip = adapter.module("skip")
    inner, outer = skip.Namespace(), skip.Namespace()
    layers = [
        stashing(skip).isolate(outer),
        stashing(skip).isolate(inner),
        popping(skip).isolate(inner),
        popping(skip).isolate(outer, only=["skip"]),
    ]
    x = torch.linspace(-1, 1, 4)
    pipe = adapter.pipe(nn.Sequential(*layers), [1, 2, 1], 2)
    torch.testing.assert_close(pipe(x), x.tanh().tanh() * (3 * x.tanh()) * (3 * x))


@pytest.mark.parametrize(
    ("order", "bullet"),
    [
        ("s", "no module declared 'skip' as poppable but stashed"),
        ("p", "'0' declared 'skip' as poppable but it was not stashed"),
        ("ps", "'0' declared 'skip' as poppable but it was not stashed"),
        ("ssp", "'1' redeclared 'skip' as stashable but not isolated by namespace"),
        ("spp", "'2' redeclared 'skip' as poppable but not isolated by namespace"),
    ],
)
def test_each_stash_has_one_pop_and_each_pop_one_stash(adapter: Any, order: str, bullet: str) -> None:
    skip = adapter.module("skip")
    module = nn.Sequential(*({"s": stashing, "p": popping}[letter](skip) for letter in order))
    message = f"^one or more pairs of stash and pop do not match:\n\n(\\* .*\n)*\\* {re.escape(bullet)}"
    with pytest.raises(TypeError, match=message):
        skip.verify_skippables(module)
    with pytest.raises(TypeError, match=message):
        adapter.pipe(module, [len(module)])


def test_the_same_names_in_every_module(adapter: Any) -> None:
    package = adapter.module("skip")
    for name in ("skippable", "stash", "pop", "verify_skippables"):
        assert getattr(adapter.module("skip.skippable"), name) is getattr(package, name)
    assert adapter.module("skip.namespace").Namespace is package.Namespace
