import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.model.parts.adapter import Adapter
from pipework.model.parts.skeleton import AbsentUnit, Container, Skeleton, Unit, share, twin_of
from pipework.model.parts.units import find_units


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.scale, self.shift = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
        self.register_buffer("mask", torch.ones(2))
        self.settings = {"depth": 3}
        self.alias = [self.blocks[1]]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale + self.shift


def test_a_part_has_twins_of_its_units_and_the_parameters_that_it_reads() -> None:
    model = Net()
    part: Any = Skeleton(model, find_units(model), Adapter()).copy({"blocks.1", "scale"})[0]
    assert [(isinstance(each, Unit), type(each) is AbsentUnit) for each in part.blocks] == [
        (True, True), (True, False), (True, True),
    ]  # fmt: skip
    assert part.blocks[1].weight is model.blocks[1].weight
    assert part.alias[0] is part.blocks[1], "what refers to a unit refers to its twin"
    assert {id(each) for each in part.parameters()} == {*map(id, (*model.blocks[1].parameters(), model.scale))}
    assert (isinstance(part, Container), type(part).__name__) == (True, "Net")
    assert (list(part._parameters), list(part.elsewhere)) == (["scale"], ["shift"])
    assert (part.settings is model.settings, part.mask is model.mask, part.alias is model.alias) == (True, True, False)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda twin: pickle.loads(pickle.dumps(twin))])
def test_a_copied_twin_is_one_that_may_share_again(copied) -> None:
    twin = twin_of("layer", nn.Linear(2, 2))
    other = copied(twin)
    assert (other.unit_name, other.weight is twin.weight) == ("layer", False)
    assert torch.equal(other.weight, twin.weight)
    module = nn.Linear(2, 2)
    share(other, module)
    assert other.weight is module.weight


def test_a_stand_in_answers_for_its_module_and_does_not_compute() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    module.kind = "wide"
    stand_in = AbsentUnit("layer", module)
    assert isinstance(stand_in, nn.Sequential)
    assert (stand_in.kind, len(stand_in), bool(stand_in), stand_in[0]) == ("wide", 1, True, module[0])
    assert not bool(AbsentUnit("empty", nn.Sequential()))
    assert list(stand_in.parameters()) == []
    stand_in.train(False)
    assert module.training
    with pytest.raises(RuntimeError, match="layer runs in another part"):
        stand_in(torch.ones(1, 2))
    assert copy.deepcopy(stand_in)[0] is module[0]
    own, copied_with_it = copy.deepcopy((module, stand_in))
    assert copied_with_it[0] is own[0]
