import pytest
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pipework.runtime.skips.skip import Skip
from pipework.runtime.skips.stashed import Stashed, StashedTensors

SKIPS = [Skip(("", "features"), 0, (2,), places=(0, 1, 2))]
X = torch.zeros(4, 6)


def marked(stashed: Tensor, output: Tensor, stage: int = 0) -> bool:
    structure = StashedTensors(stage, SKIPS).marking(None, [output], [], [(0, stashed)])
    assert structure in (None, Stashed(None, ((0, 0),)))
    return structure is not None


@pytest.mark.parametrize(
    ("stashed", "output", "expected"),
    [
        (X, X, True),
        (X, X.t(), True),
        (X, X.clone(), False),
        (X[:2], X[2:], False),
        (X[:, :3], X[:, 3:], False),
        (X[:, :4], X[:, 3:], True),
        (X[:0], X, False),
        (X, X.to_sparse(), False),
        (X.to("meta"), X.to("meta"), False),
    ],
)
def test_outputs_that_share_memory_with_a_skip_are_marked(stashed: Tensor, output: Tensor, expected: bool) -> None:
    assert marked(stashed, output) is expected
    assert marked(output, stashed) is expected


def test_behind_the_last_stage_that_pops_nothing_is_marked() -> None:
    assert marked(X, X, stage=1)
    assert not marked(X, X, stage=2)


def test_a_stage_that_changes_a_marked_input_is_refused_by_name() -> None:
    stage, leaf = StashedTensors(1, SKIPS), X.clone()
    arrived = stage.arrived([torch.ones(1), leaf], Stashed(None, ((1, 0),)), {})
    stage.refuse_overwritten(arrived)
    leaf.add_(1)
    with pytest.raises(RuntimeError, match=r"stage 1 has changed skip tensor 'features' in place .* by stage 0"):
        stage.refuse_overwritten(arrived)


def test_what_other_stages_pop_too_is_not_changed_by_one_of_them() -> None:
    skips = [Skip("a", 0, (1, 2), (0, 1, 2)), Skip("b", 0, (2,), (0, 1, 2))]
    leaves = [torch.ones(1, requires_grad=True), torch.ones(1), torch.ones(1)]
    first, last = StashedTensors(1, skips), StashedTensors(2, skips)
    assert [each.skip for each in first.arrived([], Stashed(None), {0: leaves[1]})] == [0]
    # The last one: others have saved it if it has a gradient; what nobody else pops is its own.
    assert last.arrived([], Stashed(None), {0: leaves[1], 1: leaves[2]}) == []
    arrived = last.arrived([], Stashed(None), {0: leaves[0], 1: leaves[2]})
    assert [each.skip for each in arrived] == [0]
    increment_version(leaves[0])
    with pytest.raises(RuntimeError, match=r"skip tensor 'a' in place .* another stage has popped it, too; clone"):
        last.refuse_overwritten(arrived)
