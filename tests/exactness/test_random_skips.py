"""Random models whose layers stash, pop and use tensors in every order, cut at random: bitwise as without cuts."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import pop, skippable, stash
from pipework.skip import verify_skippables
from pipework.testing import draw_key
from tests.conftest import CHECKPOINT_MODES, USUAL, WAYS, bitwise, named_gradients
from tests.ranks import held

WIDTH = 5


class Uses(nn.Module):
    """Uses a tensor so many times; the gradients of these uses are added in their order."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList([torch.randn(WIDTH) * random.choice([0.1, 1, 3]) for _ in range(times)])

    def forward(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.sin() * factor for factor in self.factors]


class Random(nn.Module):
    """A layer that pops and stashes some names.

    Args:
        pops: names, each with how often the layer uses the tensor.
        stashes: names, each with what is stashed.
    """

    def __init__(self, pops: dict[str, int], stashes: dict[str, str]) -> None:
        super().__init__()
        self.pops = nn.ModuleDict({name: Uses(times) for name, times in pops.items()})
        self.stashes = stashes
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.of_input = Uses(random.choice([0, 1, 1, 2, 3]))
        self.beside = nn.ModuleDict({name: Uses(random.choice([0, 1, 2])) for name in stashes})
        self.early = random.random() < 0.5
        self.returns = random.choice(["new", "new", "clone", "relu_"])

    def forward(self, x: Tensor) -> Any:
        parts = []
        if self.early:
            parts += self.of_input(x)
        for name, uses in self.pops.items():
            parts += uses((yield pop(name)))
        parts.append(torch.tanh(self.linear(x)))
        if not self.early:
            parts += self.of_input(x)
        random.Random(len(parts)).shuffle(parts)
        y = sum(parts[1:], parts[0])
        aside = y + 1
        tensors = {"input": x, "returned": y}
        for name, kind in self.stashes.items():
            tensor = y * 2 if kind == "aside" else tensors[kind]
            yield stash(name, tensor)
            aside = sum(self.beside[name](tensor), aside)
        if "returned" in self.stashes.values():
            return y
        return {"new": aside / 3, "clone": y.clone() + aside, "relu_": nn.functional.relu(aside + y, inplace=True)}[
            self.returns
        ]


APART = ("aside", "aside", "input")  # one name for each tensor that leaves a stage, mostly
RETURNED = ("aside", "returned", "returned")  # the next layer uses it, too


def random_model(layers: int, kinds: Sequence[str]) -> nn.Sequential:
    pops: list[dict[str, int]] = [{} for _ in range(layers)]
    stashes: list[dict[str, str]] = [{} for _ in range(layers)]
    for name in map(str, range(random.choice([1, 2, 3, 4]))):
        source = random.randrange(layers - 1)
        kind = random.choice(kinds)
        stashes[source][name] = "aside" if kind in stashes[source].values() else kind
        behind = range(source + 1, layers)
        for layer in random.sample(behind, min(len(behind), random.choice([1, 2, 2, 3, 4]))):
            pops[layer][name] = random.choice([1, 1, 2, 3])
    made = [skippable(stash=list(s), pop=list(p))(Random)(p, s) for p, s in zip(pops, stashes, strict=True)]
    model = nn.Sequential(*made)
    verify_skippables(model)
    return model


def random_balance(layers: int) -> list[int]:
    """With some cuts, or one behind every layer."""
    cuts = random.choice([1, 2, layers // 2, layers - 1, layers - 1])
    ends = [0, *sorted(random.sample(range(1, layers), cuts)), layers]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def check(seed: int, kinds: Sequence[str]) -> None:
    """Differentiates one random model, and compares everything with the plain loop."""
    random.seed(seed)
    torch.manual_seed(seed)
    way = WAYS[USUAL[seed % len(USUAL)]]
    rows, chunks, layers = random.choice([2, 4, 7]), random.choice([1, 2, 3]), random.choice([3, 4, 6, 8])
    plain = random_model(layers, kinds)
    pipe = way.pipe(plain, chunks, random.choice(CHECKPOINT_MODES), balance=random_balance(layers))
    x, target = torch.randn(rows, WIDTH), torch.randn(rows)
    needs_gradient = random.random() < 0.5
    retains = random.random() < 0.2
    inputs = [x.clone().requires_grad_(needs_gradient) for _ in range(2)]
    torch.manual_seed(seed)
    reference = way.reference(plain, inputs[0], target, chunks, draw_key())
    torch.manual_seed(seed)
    loss, output = way.run(pipe, inputs[1], target)
    bitwise(output, reference.output)
    bitwise(loss, reference.loss)
    if retains:
        loss.backward(retain_graph=True)
        pipe.zero_grad()
        inputs[1].grad = None
    loss.backward()
    expected, actual = named_gradients(held(plain, pipe)), named_gradients(pipe)
    assert expected.keys() == actual.keys()
    for name in expected:
        bitwise(actual[name], expected[name])
    if needs_gradient:
        bitwise(inputs[1].grad, inputs[0].grad)


THOROUGH = [pytest.param(range(first, first + 14), marks=pytest.mark.thorough) for first in range(14, 84, 14)]
SLOW = [pytest.param(range(first, first + 50), marks=pytest.mark.slow) for first in range(100, 2100, 50)]


@pytest.mark.parametrize("seeds", [range(14), *THOROUGH, *SLOW], ids=str)
@pytest.mark.parametrize("kinds", [APART, RETURNED], ids=["apart", "returned"])
def test_random_models_with_skips(seeds: Sequence[int], kinds: Sequence[str]) -> None:
    for seed in seeds:
        check(seed, kinds)
