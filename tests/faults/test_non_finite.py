"""Row 14 of the fault matrix: NaN or an infinity at one stage and micro-batch, forward or backward."""

from typing import Any

import pytest
import torch
from torch import nn

from pipework import Pipe


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
    pipe = way.pipe(module, 3, checkpoint, balance=[1] * 4, check_finite=check_finite)
    return pipe, (torch.cat([torch.randn(3, 3), torch.arange(3.0)[:, None]], dim=1), torch.randn(3))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("micro_batch", range(3))
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_first_place_is_named(way: Any, direction: str, stage: int, micro_batch: int, bad: float) -> None:
    pipe, batch = pipe_and_batch(way, check_finite=True)
    pipe[stage].where = (direction, micro_batch, bad)
    with pytest.raises(FloatingPointError, match="is not finite") as caught:
        way.loss(pipe, *batch).backward()
    kind = direction[0].upper()
    assert caught.value.__notes__ == [f"pipework: stage {stage}, micro-batch {micro_batch}, action {kind}"]
    assert f"stage {stage}" in str(caught.value) or f"parameter '{stage}." in str(caught.value)
    pipe[stage].where = None
    way.loss(pipe, *batch).backward()


@pytest.mark.parametrize("way", ["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs"], indirect=True)
def test_a_loss_that_is_not_finite_is_the_last_stages(way: Any) -> None:
    pipe, (x, y) = pipe_and_batch(way, check_finite=True)
    y[1] = float("nan")
    with pytest.raises(FloatingPointError, match="an output of stage 3 is not finite: 1 NaN") as caught:
        pipe(x, target=y)
    assert caught.value.__notes__ == ["pipework: stage 3, micro-batch 1, action F"]


def test_unchecked_it_propagates_as_in_pytorch(way: Any) -> None:
    pipe, batch = pipe_and_batch(way, check_finite=False)
    pipe[0].where = ("forward", 1, float("nan"))
    loss = way.loss(pipe, *batch)
    assert loss.isnan()
    loss.backward()
    assert pipe[2].linear.weight.grad.isnan().any()


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_finite_values_pass_unchanged(way: Any, checkpoint: str) -> None:
    checked, batch = pipe_and_batch(way, check_finite=True, checkpoint=checkpoint)
    unchecked, _ = pipe_and_batch(way, check_finite=False, checkpoint=checkpoint)
    unchecked.load_state_dict(checked.state_dict())
    for pipe in (checked, unchecked):
        way.loss(pipe, *batch).backward()
    for a, b in zip(checked.parameters(), unchecked.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
