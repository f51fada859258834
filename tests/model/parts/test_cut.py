"""How a model is cut: groups of units, balances, and what is refused."""

import pytest
import torch
from torch import Tensor, nn

from pipework.model.parts.cut import Cuttable
from pipework.model.parts.trace import CannotCut
from tests.model.parts.models import WIDTH, Block

X = torch.randn(2, WIDTH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.act = nn.ReLU()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.act(block(x))
        return x


def test_units_without_parameters_stay_with_what_stands_before_them() -> None:
    cuttable = Cuttable(Net(), X, blocks=None)
    assert cuttable.groups == [["blocks.0#0", "act#0"], ["blocks.1#0", "act#1"], ["blocks.2#0", "act#2"]]
    assert list(cuttable.containers) == ["", "blocks"]
    parts = cuttable.sequential([1, 2])
    counts = [sum(1 for _ in part.parameters()) for part in parts]
    assert counts == [4, 10]  # a block has four; the one that is never called is in the last part
    assert {id(each) for each in parts.parameters()} == {id(each) for each in cuttable.model.parameters()}


@pytest.mark.parametrize("balance", [[1, 1], [4], [3, 0], []])
def test_balances_of_another_length_are_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match=r"groups of units, and Net has 3: blocks.0#0, blocks.1#0, blocks.2#0"):
        Cuttable(Net(), X, blocks=None).sequential(balance)


def test_too_few_units_and_other_samples() -> None:
    with pytest.raises(CannotCut, match=r"Identity has 0 units at which it could be cut.*blocks= names their classes"):
        Cuttable(nn.Identity(), X, blocks=None)
    with pytest.raises(CannotCut, match=r"Sequential has 1 unit at which it could be cut"):
        Cuttable(nn.Sequential(nn.Linear(WIDTH, WIDTH)), X, blocks=None)
    with pytest.raises(CannotCut, match=r"the sample does not go with the forward of Net: .*a dict has keyword arg"):
        Cuttable(Net(), {"y": X}, blocks=None)


def test_hooks_and_forwards_on_containers_are_refused() -> None:
    model = Net()
    handle = model.blocks.register_forward_hook(print)
    with pytest.raises(CannotCut, match=r"'blocks' \(ModuleList\) has hooks.*\(blocks.0, blocks.1, blocks.2, ...\)"):
        Cuttable(model, X, blocks=None)
    handle.remove()
    model.forward = model.forward
    with pytest.raises(CannotCut, match="the forward of this Net has been replaced on the module itself"):
        Cuttable(model, X, blocks=None)


def test_a_model_in_evaluation_mode_is_tried_in_training() -> None:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps = getattr(self, "steps", 0) + x.sum()
            return super().forward(x)

    with pytest.raises(CannotCut, match=r"keeps a state in self.steps"):
        Cuttable(Dropping().train(), X, blocks=None)
