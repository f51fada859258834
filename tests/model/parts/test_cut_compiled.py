"""Units that are compiled, before a pipe is attached or after: they stay compiled, and compute what they did."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from pipework import to_sequential
from tests.model.parts.harness import assert_same, attached, loss_in, plain_step
from tests.model.parts.models import WIDTH, Block, batch_of, loss_of

# Dynamo looks at the gradient of each input when it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, labels: Any = None) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(x), labels)


class Counting:
    """A backend that compiles nothing, and counts for how many graphs it was asked."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1
        return graph.forward


def in_place(model: Any, backend: Counting) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def replaced(model: Any, backend: Counting) -> None:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend=backend)


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch.compiler.reset()


def check(model: nn.Module, plain: nn.Module) -> None:
    batch = batch_of(Chain)
    for _ in range(2):
        loss, expected = loss_in(model(**batch)), plain_step(plain, batch, 4)
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        assert_same(model, plain)


@pytest.mark.parametrize("options", [{}, {"checkpoint": "always"}, {"schedule": "zb-h1"}], ids=str)
@pytest.mark.parametrize("compiles", [in_place, replaced])
def test_compiled_before(compiles: Callable[..., None], options: dict[str, Any]) -> None:
    model, backends = Chain(), [Counting(), Counting()]
    plain = copy.deepcopy(model)
    compiles(model, backends[0])
    compiles(plain, backends[1])
    names = list(model.state_dict())
    attached(model, batch_of(Chain), chunks=4, balance=[3, 3], check=False, **options)
    assert backends[0].graphs == 0  # the dry run compiles nothing
    check(model, plain)
    assert backends[0].graphs == backends[1].graphs == 1  # the blocks are alike, and so are stages and micro-batches
    assert list(model.state_dict()) == names


def test_compiled_after() -> None:
    model, backend = Chain(), Counting()
    plain = copy.deepcopy(model)
    pipe = attached(model, batch_of(Chain), chunks=4, balance=[3, 3])
    pipe.compile(backend=backend)  # the units: the forward around them is not compiled
    check(model, plain)
    # The blocks are alike. Before 2.15, PyTorch traces no module of its own that is called alone.
    assert backend.graphs == (3 if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else 1)


def test_a_model_that_is_compiled_as_a_whole_is_refused() -> None:
    batch = batch_of(Chain)
    message = r"this Chain was compiled as a whole, .*: give the model itself, and compile its layers"
    model = Chain()
    model.compile(backend="eager")
    for each in (model, torch.compile(Chain(), backend="eager")):
        with pytest.raises(ValueError, match=message):
            attached(each, batch, balance=[3, 3])
        with pytest.raises(ValueError, match=message):
            to_sequential(each, {"x": batch["x"]})
