"""The actions of one stage, driven by hand: this test is the stage before and the stage behind."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipework.model.sequential import TupleRule
from pipework.runtime.caller_context import CallerContext
from pipework.runtime.device import WorkerDevice
from pipework.runtime.stage.stage import Stage
from pipework.runtime.stage.stage_run import StageRun
from pipework.runtime.transport import LocalTransport
from pipework.schedule import Action

MIDDLE = 1
CPU = WorkerDevice(torch.device("cpu"))


class Driven:
    """The middle one of three stages."""

    def __init__(self, layer: nn.Module, *, checkpointed: bool = False, splits: bool = False) -> None:
        stage = Stage(
            MIDDLE, [("layer", layer)], first_number=1, device=CPU, shared=set(), shares_output=False, skips=[],
            tuples=TupleRule.BY_SIGNATURE,
        )  # fmt: skip
        self.run = StageRun(
            stage, CallerContext.capture([]), {0, 1} if checkpointed else set(), own_leaves=frozenset(),
            sends_gradients=True, check_finite=False, splits=splits,
        )  # fmt: skip
        self.transport = LocalTransport((0, 1, 2), {})
        self.run.connect(self.transport.endpoints[MIDDLE], stream=None)

    def forward(self, x: Tensor, micro_batch: int = 0) -> Tensor:
        self.transport.endpoints[0].sender("F", MIDDLE)(micro_batch, ((x,), None))
        with self.run.aliases.standing_in():
            self.run.forward(Action("F", MIDDLE, micro_batch))
        ((output,), _) = self.transport.endpoints[2].receiver("F", MIDDLE + 1)(micro_batch)
        return output

    def send_gradient(self, gradient: Tensor, micro_batch: int = 0) -> None:
        self.transport.endpoints[2].sender("B", MIDDLE)(micro_batch, ((gradient,), None))

    def received_gradient(self, micro_batch: int = 0) -> Tensor:
        ((gradient,), _) = self.transport.endpoints[0].receiver("B", MIDDLE - 1)(micro_batch)
        return gradient


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def plainly(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of the parameters if the output's gradient is 1."""
    layer, x = copy.deepcopy(layer), x.detach().requires_grad_()
    output = layer(x)
    output.backward(torch.ones_like(output))
    return [output.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("kinds", ["FB", "FRB", "FIW"])
def test_the_actions_of_a_micro_batch_give_autograds_gradients(kinds: str) -> None:
    layer, inputs = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), [leaf(4, 3), leaf(4, 3)]
    driven = Driven(layer, checkpointed="R" in kinds, splits="W" in kinds)
    expected = [plainly(layer, x) for x in inputs]
    outputs = [driven.forward(x, number) for number, x in enumerate(inputs)]
    assert all(torch.equal(output, plain[0]) for output, plain in zip(outputs, expected, strict=True))
    assert all(output.grad_fn is None and output.requires_grad for output in outputs)
    with driven.run.aliases.standing_in():
        for number in (0, 1):
            driven.send_gradient(torch.ones(4, 2), number)
            for kind in kinds[1:]:
                (driven.run.recompute if kind == "R" else driven.run.backward)(Action(kind, MIDDLE, number))
            assert torch.equal(driven.received_gradient(number), expected[number][1])
    sums = [one + two for one, two in zip(expected[0][2:], expected[1][2:], strict=True)]
    assert all(map(torch.equal, driven.run.aliases.take_gradients(), sums))
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_a_recomputation_of_a_changed_input_is_refused() -> None:
    driven, x = Driven(nn.Linear(3, 2), checkpointed=True), torch.randn(4, 3)
    driven.forward(x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="stage 1 has been modified by an inplace operation since its forward"):
        driven.run.recompute(Action("R", MIDDLE, 0))


def test_an_error_names_the_layer() -> None:
    driven = Driven(nn.Linear(3, 2))
    with pytest.raises(RuntimeError) as caught:
        driven.forward(leaf(4, 5))
    assert caught.value.__notes__ == ["pipework: in layer 'layer' (Linear)"]


def test_clear_drops_everything() -> None:
    driven = Driven(nn.Linear(3, 2))
    driven.forward(leaf(4, 3))
    driven.run.clear()
    driven.send_gradient(torch.ones(4, 2))
    with pytest.raises(KeyError):
        driven.run.backward(Action("B", MIDDLE, 0))
