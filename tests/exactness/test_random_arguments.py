"""Random arguments of a pipe: each mini-batch is computed right, to the last bit, or refused, or warned of.

What an argument means is known here, and not to the pipe: a tensor has the rows in one of its dimensions, or is needed
whole, and a list or an object has an entry for each row or not. Sizes are few, so that they often coincide with the
number of rows. A tensor that is needed whole is made of sizes that the first argument has, too, as masks and position
embeddings are; one whose first dimension alone happens to have as many entries as the batch has rows looks like rows.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from pipework import Chunk, NoChunk, Pipe, PipeWarning

if TYPE_CHECKING:
    from collections.abc import Callable

BATCHES, GROUPS = 300, 6


class Argument:
    """A random value, and what it means.

    Attributes:
        given: as the pipe gets it.
        part: the value for some rows.
        read: from a value and a number of rows to a number for each row, or one for all.
    """

    def __init__(self, given: Any, part: Callable[[slice], Any], read: Callable[[Any, int], Tensor | float]) -> None:
        self.given, self.part, self.read = given, part, read


def with_rows(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    shape = [draw.choice(sizes) for _ in range(draw.randrange(3))]
    dim = draw.choice([0, 0, 0, draw.randint(0, len(shape))])
    tensor = torch.randn(*shape[:dim], rows, *shape[dim:])
    given = draw.choice([tensor, tensor, Chunk(tensor, dim=draw.choice([dim, dim - tensor.dim()]))])
    return Argument(
        given,
        lambda piece: tensor[(slice(None),) * dim + (piece,)],
        lambda value, _: value.movedim(dim, 0).flatten(1).sum(1) if value.dim() > 1 else value,
    )


def whole(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    tensor = torch.randn(*draw.choices(sizes, k=draw.randint(1, 3)))
    return Argument(draw.choice([tensor, NoChunk(tensor)]), lambda _: tensor, lambda value, _: value.sum())


def plain(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    value = draw.choice([None, True, 3, 0.5, "text", torch.float32, [2.0, 3.0, 5.0], (1,) * draw.choice(sizes)])
    is_list = isinstance(value, list | tuple)
    given = NoChunk(value) if is_list and draw.random() < 0.5 else value
    return Argument(given, lambda _: value, lambda value, _: float(sum(value)) if is_list else 1.0)


def list_of_rows(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    values = torch.randn(rows)
    size = draw.choice(sizes)
    kind: Callable[[Tensor], Any] = draw.choice(
        [
            Tensor.tolist,
            lambda values: tuple(values.tolist()),
            lambda values: [str(value) for value in values.tolist()],
            lambda values: numpy.array(values.tolist()),
            lambda values: [value.expand(size) for value in values],
        ]
    )
    return Argument(
        kind(values),
        lambda piece: kind(values[piece]),
        lambda found, rows: torch.tensor([float(each if not isinstance(each, Tensor) else each[0]) for each in found])[
            :rows
        ],
    )


def an_object(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    values, has_rows = torch.randn(rows), draw.random() < 0.6
    tensor = values if has_rows else torch.randn(draw.choice(sizes))

    def held(tensor: Tensor) -> SimpleNamespace:
        return SimpleNamespace(name="held", values={"tensor": tensor})

    def read(value: SimpleNamespace, rows: int) -> Tensor:
        found = value.values["tensor"]
        return found[:rows] if has_rows else found.sum()

    given = held(tensor)
    return Argument(
        NoChunk(given) if not has_rows and draw.random() < 0.5 else given,
        lambda piece: held(tensor[piece]) if has_rows else given,
        read,
    )


def container(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    inner = [argument(draw, rows, sizes) for _ in range(draw.randint(1, 3))]
    kind: Callable[[list[Any]], Any] = draw.choice([list, tuple, lambda values: dict(enumerate(values))])

    def read(value: Any, rows: int) -> Tensor | float:
        values = value.values() if isinstance(value, dict) else value
        total: Tensor | float = 0.0
        for each, found in zip(inner, values, strict=True):
            total = total + each.read(found, rows)
        return total

    return Argument(
        kind([each.given for each in inner]), lambda piece: kind([each.part(piece) for each in inner]), read
    )


def argument(draw: random.Random, rows: int, sizes: list[int]) -> Argument:
    kinds = [with_rows] * 4 + [whole] * 2 + [plain] * 2 + [list_of_rows, an_object, container]
    return draw.choice(kinds)(draw, rows, sizes)


class Reads(nn.Module):
    """Computes a number for each row of all that it gets."""

    def __init__(self, arguments: list[Argument], names: list[str]) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.arguments, self.names = arguments, names

    def forward(self, x: Tensor, *more: Any, **named: Any) -> Tensor:
        total = x.flatten(1).sum(1)
        for each, value in zip(self.arguments, (*more, *(named[name] for name in self.names)), strict=True):
            found = each.read(value, len(x))
            assert not isinstance(found, Tensor) or found.shape in ((), total.shape)
            total = total + found
        return (total * self.factor)[:, None]


NOTHING = Argument(None, lambda piece: None, lambda value, rows: 0.0)


def of_kind(seed: int, rows: int, sizes: list[int]) -> Argument:
    """The same seed draws the same kind, with the same meaning, for any number of rows."""
    return argument(random.Random(seed), rows, sizes)


def outcomes(seed: int) -> list[str]:
    """Of three mini-batches of one pipe, with other rows and sizes, where arguments may be None.

    Each is "right", "refused", "loud" (a layer raised an error), wrong and "warned" of, or "silent".
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    chunks, count = draw.randint(1, 4), draw.randint(0, 4)
    by_name = draw.randint(0, count)
    names, split = [f"name{n}" for n in range(by_name)], count - by_name
    layer = Reads([], names)
    pipe = Pipe(nn.Sequential(layer, nn.Tanh()), chunks, balance=[1, 1], devices=["cpu", "cpu"])
    found, was_warned = [], False
    for _ in range(3):
        rows, sizes = draw.randint(1, 7), [draw.randint(1, 7), draw.randint(1, 7)]
        x = torch.randn(rows, *sizes)
        arguments = [NOTHING if draw.random() < 0.2 else of_kind(100 * seed + n, rows, sizes) for n in range(count)]
        layer.arguments = arguments
        layer.factor.grad = None
        given = [each.given for each in arguments]
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", PipeWarning)
            try:
                output = pipe(x, *given[:split], **dict(zip(names, given[split:], strict=True)))
            except Exception as error:
                in_layer = any("micro-batch" in note for note in getattr(error, "__notes__", ()))
                found.append("loud" if in_layer else "refused")
                continue
        was_warned |= any("give Pipe chunks" not in str(each.message) for each in seen)
        output.sum().backward()
        gradient, layer.factor.grad = layer.factor.grad, None
        expected = []
        for piece in torch.arange(rows).tensor_split(min(chunks, rows)):
            cut = slice(int(piece[0]), int(piece[-1]) + 1)
            parts = [each.part(cut) for each in arguments]
            part = layer(x[cut], *parts[:split], **dict(zip(names, parts[split:], strict=True))).tanh()
            part.sum().backward()
            expected.append(part.detach())
        is_right = torch.equal(output, torch.cat(expected)) and torch.equal(gradient, layer.factor.grad)
        found.append("right" if is_right else "warned" if was_warned else "silent")
    return found


@pytest.mark.one_process("how a batch is cut has nothing to do with the workers")
@pytest.mark.parametrize("group", range(GROUPS))
def test_no_batch_is_cut_wrongly_in_silence(group: int) -> None:
    found = {seed: outcomes(seed) for seed in range(group, BATCHES, GROUPS)}
    assert not {seed: each for seed, each in found.items() if "silent" in each}
    counts = Counter(outcome for each in found.values() for outcome in each)
    assert counts["right"] >= counts.total() // 2, counts
    assert counts["refused"] >= counts.total() // 10, counts
    assert counts["loud"] <= counts.total() // 20, counts
