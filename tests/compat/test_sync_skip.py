"""Skip connections under the old `Pipe`: each tensor has one layer that stashes and one that pops."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.compat.sync import Namespace, Pipe, pop, skippable, stash, verify_skippables

pytestmark = pytest.mark.usefixtures("rpc")


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return x * 2


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x + skip


@skippable(stash=["skip"])
class StashNothing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        yield stash("skip", None)
        return x


@skippable(pop=["skip"])
class PopNothing(nn.Module):
    def forward(self, x: Tensor) -> Any:
        assert (yield pop("skip")) is None
        return x


@skippable(stash=["skip"], pop=["skip"])
class Both(nn.Module):
    pass


@skippable(stash=["skip"])
class Forgetful(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def arranged(layers: Iterable[nn.Module], sizes: Iterable[int]) -> nn.Sequential:
    """Layers in nested sequences of these sizes."""
    left = iter(layers)
    return nn.Sequential(*(nn.Sequential(*(next(left) for _ in range(size))) for size in sizes))


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.parametrize("sizes", [[3], [1, 2], [1, 1, 1], [2, 1]], ids=str)
def test_a_tensor_reaches_the_layer_that_pops_it(sizes: list[int], checkpoint: str) -> None:
    linear = nn.Linear(2, 2)
    pipe, x = Pipe(arranged([Stash(), linear, Pop()], sizes), 2, checkpoint), torch.randn(4, 2, requires_grad=True)
    output = pipe(x).local_value()
    torch.testing.assert_close(output, linear(x * 2) + x)
    (actual,) = torch.autograd.grad(output.sum(), x)
    (expected,) = torch.autograd.grad((linear(x * 2) + x).sum(), x)
    torch.testing.assert_close(actual, expected)


def test_none_can_be_stashed() -> None:
    x = torch.randn(4, 2)
    assert torch.equal(Pipe(nn.Sequential(StashNothing(), PopNothing()), 2)(x).local_value(), x)


def test_namespaces_keep_equal_names_apart() -> None:
    outer, inner = Namespace(), Namespace()
    module = nn.Sequential(Stash().isolate(outer), Stash().isolate(inner), Pop().isolate(inner), Pop().isolate(outer))
    assert Pipe(module, 2)(torch.ones(2, 1)).local_value().tolist() == [[7.0], [7.0]]  # 1, 2, 4, 4 + 2, 6 + 1


@pytest.mark.parametrize(
    ("layers", "bullets"),
    [
        ([Stash()], ["no module declared 'skip' as poppable but stashed"]),
        ([Pop()], ["'0' declared 'skip' as poppable but it was not stashed"]),
        ([Stash(), Stash(), Pop()], ["'1' redeclared 'skip' as stashable but not isolated by namespace"]),
        ([Stash(), Pop(), Pop()], ["'2' redeclared 'skip' as poppable but not isolated by namespace"]),
        ([Both()], ["'0' declared 'skip' both as stashable and as poppable"]),
        (
            [Pop(), Stash()],
            [
                "'0' declared 'skip' as poppable but it was not stashed",
                "no module declared 'skip' as poppable but stashed",
            ],
        ),
    ],
)
def test_pairs_that_do_not_match_are_refused(layers: list[nn.Module], bullets: list[str]) -> None:
    for check in (Pipe, verify_skippables):
        with pytest.raises(TypeError) as caught:
            check(nn.Sequential(*layers))
        told = "\n".join(f"* {bullet}" for bullet in bullets)
        assert str(caught.value) == f"one or more pairs of stash and pop do not match:\n\n{told}"


def test_a_broken_promise_is_an_error_of_the_mini_batch() -> None:
    with pytest.raises(RuntimeError, match="'skip' must be stashed but have not"):
        Pipe(nn.Sequential(Forgetful(), Pop()))(torch.ones(2, 1))
