"""Row 14 of the fault matrix: NaN or an infinity at one stage and micro-batch, forward or backward."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe
from pipework.testing import reference_backward
from tests.conftest import USUAL, WAYS
from tests.tiers import sampled


class Spoil(nn.Module):
    """Puts a bad value into its output or its gradient, on the micro-batch whose number stands in the last column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.where: tuple[str, int, float] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = x[:, -1:]
        y = self.linear(x[:, :-1])
        if self.where is not None and int(number[0]) == self.where[1]:
            if self.where[0] == "forward":
                y = y * torch.tensor([1.0, self.where[2], 1.0])
            else:
                y.register_hook(lambda gradient: gradient * self.where[2])
        return torch.cat([y, number], dim=1)


Batch = tuple[torch.Tensor, torch.Tensor]


def pipe_and_batch(way: Any, check_finite: bool, checkpoint: str = "never") -> tuple[Pipe, Batch]:
    module = nn.Sequential(*(Spoil() for _ in range(4)))
    pipe = way.pipe(module, 3, checkpoint, balance=[1] * 4, debug="check_finite" if check_finite else ())
    return pipe, (torch.cat([torch.randn(3, 3), torch.arange(3.0)[:, None]], dim=1), torch.randn(3))


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("way", "checkpoint", "direction", "stage", "micro_batch", "bad"),
    sampled(USUAL, ["never", "always"], ["forward", "backward"], range(4), range(3), [NAN, INFINITY], each=3),
    indirect=["way"],
)
def test_the_first_place_is_named_and_finite_values_pass_unchanged(
    way: Any, checkpoint: str, direction: str, stage: int, micro_batch: int, bad: float
) -> None:
    pipe, batch = pipe_and_batch(way, check_finite=True, checkpoint=checkpoint)
    pipe[stage].where = (direction, micro_batch, bad)
    with pytest.raises(FloatingPointError, match="is not finite") as caught:
        way.loss(pipe, *batch).backward()
    kind = way.named(direction[0].upper())
    # Stage 0 sends no gradient on, so there it is seen in a parameter's, which may have waited for the second half.
    kinds = (kind, "W") if kind == "I" and stage == 0 else (kind,)
    where = f"pipework: stage {stage}, micro-batch {micro_batch}"
    assert caught.value.__notes__ in [[f"{where}, action {each}"] for each in kinds]
    assert f"stage {stage}" in str(caught.value) or f"parameter '{stage}." in str(caught.value)
    pipe[stage].where = None
    pipe.zero_grad()
    unchecked, _ = pipe_and_batch(way, check_finite=False, checkpoint=checkpoint)
    unchecked.load_state_dict(pipe.state_dict())
    for each in (pipe, unchecked):
        way.loss(each, *batch).backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(pipe.parameters(), unchecked.parameters(), strict=True))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_of_several_places_the_first_is_named(direction: str, checkpoint: str) -> None:
    """Stages are checked on the way of the value: from the first on in forward, from the last on in backward."""
    pipe, (x, _) = pipe_and_batch(WAYS["outside"], check_finite=True, checkpoint=checkpoint)
    x[:, -1] = torch.tensor([0.0, 1.0, 1.0])  # two micro-batches of three go wrong, at two stages
    for stage in (0, 1) if direction == "forward" else (1, 2):
        pipe[stage].where = (direction, 1, float("nan"))
    with pytest.raises(FloatingPointError) as caught:
        pipe(x).sum().backward()
    stage, kind = (0, "F") if direction == "forward" else (2, "B")
    assert f"pipework: stage {stage}, micro-batch 1, action {kind}" in caught.value.__notes__


class Root(nn.Module):
    """At 0 the root's gradient is infinite, which the input's gradient does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain.sqrt()


def test_a_gradient_of_a_parameter_alone_is_named() -> None:
    module = nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 4))
    pipe = Pipe(module, 2, balance=[1, 1, 1], devices=["cpu"] * 3, debug="check_finite")
    with pytest.raises(FloatingPointError, match=r"parameter '1\.gain' is not finite: 0 NaN and 1 infinite") as caught:
        pipe(torch.randn(4, 4)).sum().backward()
    assert "pipework: stage 1, micro-batch 0, action B" in caught.value.__notes__


@pytest.mark.parametrize(
    ("direction", "checkpoint", "stage", "bad"),
    sampled(["forward", "backward"], ["never", "except_last", "always"], range(3), [NAN, INFINITY, -INFINITY], each=3),
)
def test_unchecked_it_propagates_as_in_plain_pytorch(direction: str, stage: int, checkpoint: str, bad: float) -> None:
    pipe, (x, _) = pipe_and_batch(WAYS["outside"], check_finite=False, checkpoint=checkpoint)
    plain = copy.deepcopy(nn.Sequential(*pipe))
    for model in (plain, pipe):
        model[stage].where = (direction, 1, bad)
    reference = reference_backward(plain, x, torch.sum, 3, key=0)
    output = pipe(x)
    output.sum().backward()
    same = {"rtol": 0, "atol": 0, "equal_nan": True}
    torch.testing.assert_close(output, reference.output, **same)
    for actual, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, **same)
    assert not all(parameter.grad.isfinite().all() for parameter in pipe.parameters())


@pytest.mark.parametrize("way", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"], indirect=True)
def test_a_loss_that_is_not_finite_is_the_last_stages(way: Any) -> None:
    pipe, (x, y) = pipe_and_batch(way, check_finite=True)
    y[1] = float("nan")
    with pytest.raises(FloatingPointError, match="an output of stage 3 is not finite: 1 NaN") as caught:
        pipe(x, target=y)
    assert caught.value.__notes__ == ["pipework: stage 3, micro-batch 1, action F"]
