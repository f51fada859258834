"""What units change in place, and whether the forward reads it before or after."""

import pytest
import torch
from torch import Tensor, nn

from pipework.attached import to_sequential
from pipework.model.parts.analysis.refusal import CannotCut
from tests.model.parts.models import WIDTH

REFUSED = {
    "before": r"act.0#0 changes in place what layers.0#0 gave, and Net's forward uses later what it has computed from",
    "glue": r"act.0#0 changes in place what Net's forward has computed or changed outside of the units, and the",
    "glue in place": r"act.0#0 changes in place what Net's forward has computed or changed outside of the units",
}
CUTTABLE = ("after", "twice", "returned", "glue, returned")


class Net(nn.Module):
    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.act = nn.Sequential(nn.ReLU(inplace=True))
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        y, reads = self.layers[0](x), self.reads
        early = y * 2
        if reads.startswith("glue"):
            y = y.mul_(2) if reads == "glue in place" else y + 1
        z = self.act(y)
        if reads == "twice":
            z = self.act(y)
        z = self.layers[1](z)
        if reads == "before":
            z = z + early
        return self.layers[2](z + y if reads in ("after", "glue", "glue in place") else z)


@pytest.mark.parametrize("reads", REFUSED)
def test_refused(reads: str) -> None:
    with pytest.raises(CannotCut, match=REFUSED[reads]):
        to_sequential(Net(reads), torch.ones(2, WIDTH))


@pytest.mark.parametrize("reads", CUTTABLE)
def test_what_can_be_cut(reads: str) -> None:
    x, model = torch.randn(2, WIDTH), Net(reads)
    value = x
    for part in to_sequential(model, x, balance=[1, 1, 1]):
        value = part(value)
    assert torch.equal(value, model(x))
