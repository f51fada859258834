"""The user's autograd graph over gradients that exist before `backward()`; what needs nothing but autograd's own
results is compared in tests/exactness, too.
"""

import contextlib
import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.autograd.aliases import Aliases

INSIDE = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs")


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))


@pytest.fixture
def pipe(way: Any) -> Any:
    return way.pipe(layers(), 4, balance=[1, 1, 1, 1])


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4), torch.randn(8)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


# The buffers


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Where the stages' gradient buffers lie: parameter to address, filled by every backward."""
    handed: dict[int, int] = {}
    take = Aliases.take_gradients

    def spy(self: Aliases) -> list[Tensor | None]:
        taken = take(self)
        handed.update({id(p): g.data_ptr() for p, g in zip(self.parameters, taken, strict=True) if g is not None})
        return taken

    monkeypatch.setattr(Aliases, "take_gradients", spy)
    return handed


@pytest.mark.parametrize("factor", [1, 3])
def test_a_gradient_buffer_becomes_grad_without_a_copy(
    way: Any, pipe: Any, batch: Any, factor: int, buffers: dict[int, int]
) -> None:
    (way.loss(pipe, *batch) * factor).backward()
    assert len(buffers) == 8
    assert all(buffers[id(parameter)] == parameter.grad.data_ptr() for parameter in pipe.parameters())


def test_a_retained_backward_delivers_copies(way: Any, pipe: Any, batch: Any, buffers: dict[int, int]) -> None:
    loss = way.loss(pipe, *batch)
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients(pipe)]
    pipe.zero_grad(set_to_none=False)  # overwrites what was delivered
    loss.backward(retain_graph=True)
    assert all(map(torch.equal, gradients(pipe), once))
    (loss * 2).backward(retain_graph=True)
    loss.backward()
    for gradient, expected in zip(gradients(pipe), once, strict=True):
        assert torch.equal(gradient, expected + 2 * expected + expected)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_a_second_backward_without_retain_graph_says_what_to_do(way: Any, pipe: Any, batch: Any) -> None:
    loss = way.loss(pipe, *batch) if way.inside else pipe(batch[0]).sum()  # PyTorch's own graph would raise before
    loss.backward()
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time") as caught:
        loss.backward()
    (note,) = caught.value.__notes__
    assert note.startswith("pipework: this mini-batch has gone backward before. Call the pipe again")


# What autograd does with them


def test_hooks_see_the_scaled_gradient_and_may_replace_it(way: Any, pipe: Any, batch: Any) -> None:
    way.loss(pipe, *batch).backward()
    expected = [gradient.clone() for gradient in gradients(pipe)]
    pipe.zero_grad()
    seen: list[str] = []
    weight = pipe[1].weight
    weight.register_hook(lambda gradient: seen.append("hook") or gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append("accumulated"))
    (way.loss(pipe, *batch) * 2).backward()
    assert seen == ["hook", "accumulated"]
    for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, gradient * (4 if parameter is weight else 2))


def test_autograd_grad_of_some_tensors_leaves_the_others_alone(way: Any, pipe: Any, batch: Any) -> None:
    x, y = batch[0].requires_grad_(), batch[1]
    way.loss(pipe, x, y).backward()
    tensors = [*pipe.parameters(), x]
    expected = [tensor.grad for tensor in tensors]
    pipe.zero_grad()
    x.grad = None
    loss = way.loss(pipe, x, y)
    for wanted in ([0], [7], [8], [2, 5], [4, 0, 7, 8], [0]):  # in any order, along one graph
        got = torch.autograd.grad(loss, [tensors[number] for number in wanted], retain_graph=True)
        assert all(torch.equal(gradient, expected[number]) for gradient, number in zip(got, wanted, strict=True))
    assert [tensor.grad for tensor in tensors] == [None] * 9


def test_a_sum_of_losses_and_a_part_outside_of_the_pipe(way: Any, pipe: Any, batch: Any) -> None:
    x, y = batch
    scale = torch.tensor(2.0, requires_grad=True)
    loss = way.loss(pipe, x, y)
    (loss * scale + way.loss(pipe, x * 0.5, y) + pipe[0].weight.square().sum()).backward()
    assert torch.equal(scale.grad, loss.detach())
    from_both = pipe[0].weight.grad.clone()
    pipe.zero_grad()
    way.loss(pipe, x, y).backward(torch.tensor(2.0))
    way.loss(pipe, x * 0.5, y).backward()
    torch.testing.assert_close(from_both, pipe[0].weight.grad + 2 * pipe[0].weight.detach())


def test_a_backward_that_brings_no_gradient_delivers_none(way: Any, pipe: Any, batch: Any) -> None:
    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> None:
            return None

    Block.apply(way.loss(pipe, *batch)).backward()
    assert gradients(pipe) == [None] * 8


# What needs no gradient


def test_a_fully_frozen_pipe_returns_plain_tensors(way: Any, pipe: Any, batch: Any) -> None:
    pipe.requires_grad_(False)
    x, y = batch
    assert not way.loss(pipe, x, y).requires_grad
    leaf = x.clone().requires_grad_()
    way.loss(pipe, leaf, y).backward()
    assert leaf.grad is not None


# Nothing is left behind


class Keep(nn.Module):
    """Saves its product, and notes it."""

    def __init__(self, kept: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.kept = [kept]

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.kept[0].append(weakref.ref(y))
        return y.exp()


@contextlib.contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Objects of before are not looked at any more, so that `gc.get_objects` has only what is new."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def test_a_dropped_loss_frees_everything_by_reference_count(way: Any, checkpoint: str) -> None:
    kept: list[weakref.ref[Tensor]] = []
    pipe = way.pipe(nn.Sequential(*(Keep([]) for _ in range(4))), 2, checkpoint, balance=[1, 1, 1, 1])
    for layer in pipe:
        layer.kept = [kept]
    x, y = torch.randn(4, 2), torch.randn(4)
    way.loss(pipe, x, y).backward()
    pipe.zero_grad()
    with without_garbage_collector():
        kept.clear()
        assert tensors() == 0
        loss, output = way.run(pipe, x, y)
        assert tensors() > 0
        del output
        if way.inside:
            assert all(reference() is None for reference in kept), "what was differentiated is free already"
        del loss
        assert len(kept) >= 8
        assert all(reference() is None for reference in kept)
        assert tensors() == 0
        for recording in (contextlib.nullcontext(), pipe.record()):
            with recording:
                way.loss(pipe, x, y).backward()
            pipe.zero_grad()
            assert tensors() == 0


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_inputs_and_targets_are_free_when_the_loss_is_there(way: Any, checkpoint: str) -> None:
    pipe = way.pipe(layers(), 4, checkpoint, balance=[1, 1, 1, 1])
    x, y = torch.randn(8, 4), torch.randn(8)
    gone = [weakref.ref(tensor.untyped_storage()) for tensor in (x, y)]
    with without_garbage_collector():
        loss = pipe(x, target=y)
        del x, y
        assert [reference() for reference in gone] == [None, None]
        loss.backward()


@pytest.mark.parametrize("way", INSIDE, indirect=True)
def test_outputs_are_kept_only_if_they_are_wanted(way: Any) -> None:
    """Without `return_output` those of a micro-batch are gone before the pipe returns."""
    seen: list[weakref.ref[Any]] = []

    class Last(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            seen.append(weakref.ref(y.untyped_storage()))
            return y

    pipe = way.pipe(nn.Sequential(*layers()[:3], Last()), 2, "never", balance=[1, 1, 1, 1])
    x, y = torch.randn(4, 4), torch.randn(4)
    loss = pipe(x, target=y)
    assert [reference() for reference in seen] == [None] * 2
    seen.clear()
    loss, output = pipe(x, target=y, return_output=True)
    assert output.shape == (4, 4)
    assert not output.requires_grad
    loss.backward()
