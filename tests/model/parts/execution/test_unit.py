import copy
import pickle

import pytest
import torch
from torch import nn

from pipework.model.parts.execution.unit import StandIn, share, twin_of


def test_a_twin_has_all_that_its_module_has() -> None:
    module = nn.Linear(2, 2)
    twin = twin_of("layer", module)
    assert isinstance(twin, nn.Linear)
    assert type(twin).__name__ == "Linear"
    twin.eval()
    twin.extra = 3
    assert (module.training, module.extra) == (False, 3)
    module.weight = nn.Parameter(torch.ones(2, 2))
    assert twin.weight is module.weight
    assert torch.equal(twin(torch.ones(1, 2)), module(torch.ones(1, 2)))


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
    stand_in = StandIn("layer", module)
    assert isinstance(stand_in, nn.Sequential)
    assert (stand_in.kind, len(stand_in), bool(stand_in), stand_in[0]) == ("wide", 1, True, module[0])
    assert not bool(StandIn("empty", nn.Sequential()))
    assert list(stand_in.parameters()) == []
    stand_in.train(False)
    assert module.training
    with pytest.raises(RuntimeError, match="layer runs in another part"):
        stand_in(torch.ones(1, 2))


def test_a_copied_stand_in_refers_to_what_is_copied_with_it() -> None:
    module = nn.Linear(2, 2)
    alone = copy.deepcopy(StandIn("layer", module))
    assert alone.weight is module.weight
    own, stand_in = copy.deepcopy((module, StandIn("layer", module)))
    assert stand_in.weight is own.weight
