"""Parts follow what is assigned to the model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework.model.parts.cut import Cuttable
from pipework.model.parts.following import Following
from pipework.model.parts.part import Part
from tests.model.parts.models import WIDTH

X = torch.randn(2, WIDTH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.ones(WIDTH))
        self.factor = 2.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.mask * self.factor
        return x


def followed(model: nn.Module) -> tuple[Following, Any]:
    cuttable = Cuttable(model, X, blocks=None)
    parts = cuttable.sequential()
    return Following(cuttable, [layer for layer in parts if isinstance(layer, Part)], is_whole=True), parts


def test_attributes_buffers_and_flags() -> None:
    model = Net()
    following, parts = followed(model)
    model.factor, model.mask, model.new = 3.0, torch.zeros(WIDTH), "new"
    model.layers.eval()
    following.update()
    for part in parts:
        assert (part.model.factor, part.model.new) == (3.0, "new")
        assert part.model.mask is model.mask
        assert (part.training, part.model.training, part.model.layers.training) == (True, True, False)
    del model.new
    following.update()
    assert not hasattr(parts[0].model, "new")


def test_what_a_part_has_set_itself_stays() -> None:
    model = Net()
    following, parts = followed(model)
    parts[0].model.kept = 1
    following.update()
    assert parts[0].model.kept == 1


@pytest.mark.parametrize("name", ["layers.1", "layers"])
def test_another_module_is_refused(name: str) -> None:
    model = Net()
    following, _ = followed(model)
    model.set_submodule(name, Net() if name == "layers" else nn.Linear(WIDTH, WIDTH))
    with pytest.raises(RuntimeError, match=r"of Net was replaced by another module after.*`del model.forward`"):
        following.update()


def test_an_attribute_that_refers_to_a_module_is_refused() -> None:
    model = Net()
    following, _ = followed(model)
    model.chosen = [model.layers[0]]
    with pytest.raises(RuntimeError, match=r"Net.chosen refers to a module and was assigned after the pipe was att"):
        following.update()
