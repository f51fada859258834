"""What a dry run finds: the order of units, who reads what, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.model.parts.cut import Cuttable
from pipework.model.parts.trace import END, CannotCut, Source
from tests.model.parts.models import WIDTH


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.act = nn.ReLU()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor, mask: Tensor, unused: Tensor | None = None) -> Tensor:
        keep = self.act(mask - 0.5)
        first = self.blocks[0](self.embed(ids) * keep)
        return self.blocks[1](self.act(first)) * self.scale + first


INPUTS = {"ids": torch.tensor([[1, 2]]), "mask": torch.ones(1, 2, WIDTH), "unused": torch.ones(3)}


def test_units_and_their_uses() -> None:
    trace = Cuttable(Net(), INPUTS, blocks=None).trace
    assert trace.order == ("act#0", "embed#0", "blocks.0#0", "act#1", "blocks.1#0")
    assert trace.parameters == ("ids", "mask", "unused")
    assert {source.name for source in trace.inputs} == {"ids", "mask", "unused"}
    assert trace.uses == {
        Source("input", "mask", 0): {0},
        Source("input", "ids", 0): {1},
        Source("call", "act#0", 0): {2},
        Source("call", "embed#0", 0): {2},
        Source("call", "blocks.0#0", 0): {3, END},
        Source("call", "act#1", 0): {4},
        Source("call", "blocks.1#0", 0): {END},
        Source("parameter", "scale", 0): {END},
    }


def test_units_compute_nothing_and_nothing_changes() -> None:
    class Costly(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert x.is_meta
            return super().forward(x)

    class Model(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            x += 1
            for layer in self:
                x = layer(x)
                x *= 2
            return x

    model, x = Model(Costly(WIDTH, WIDTH) for _ in range(3)), torch.zeros(2, WIDTH)
    state = torch.get_rng_state()
    cuttable = Cuttable(model, x, blocks=None)
    assert not x.any()
    assert torch.equal(state, torch.get_rng_state())
    assert cuttable.trace.changed == {"input x", "0#0", "1#0", "2#0"}


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = Net()
    assert Cuttable(model, INPUTS, blocks=None).trace == Cuttable(Net(), INPUTS, blocks=None).trace


class Lengths(nn.Module):
    def forward(self, mask: Tensor) -> Tensor:
        return mask.sum(1)


@pytest.mark.parametrize(("by_unit", "read"), [(False, ("input", "mask", 0)), (True, ("call", "lengths#0", 0))])
def test_values_that_the_forward_reads_go_to_all_parts(by_unit: bool, read: tuple[str, str, int]) -> None:
    """A unit without parameters computes in the dry run, so that the forward reads its values."""

    class Reading(Net):
        def __init__(self) -> None:
            super().__init__()
            self.lengths = Lengths()

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            length = int((self.lengths(mask) if by_unit else mask.sum(1)).max())
            assert length == 2
            first = self.blocks[0](self.embed(ids)[:, :length])
            return self.blocks[1](first)

    uses = Cuttable(Reading(), {"ids": INPUTS["ids"], "mask": INPUTS["mask"]}, blocks=None).trace.uses
    assert END in uses[Source(*read)]


class Holder:
    def __init__(self, inside: Tensor) -> None:
        self.inside = inside


class Hiding(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        return iter([y]) if self.in_features == 2 else [Holder(y)]


@pytest.mark.parametrize(("width", "kind"), [(2, "list_iterator"), (3, "Holder")])
def test_tensors_that_cannot_be_sent_are_refused(width: int, kind: str) -> None:
    class Model(nn.ModuleList):
        def forward(self, x: Tensor) -> Any:
            return [layer(x) for layer in self]

    message = rf"0#0 returned an object of type {kind}, which holds its tensors where"
    with pytest.raises(CannotCut, match=message):
        Cuttable(Model(Hiding(width, width) for _ in range(2)), torch.ones(1, width), blocks=None)
