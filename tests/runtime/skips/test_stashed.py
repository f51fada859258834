import pytest
import torch
from torch import Tensor

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
