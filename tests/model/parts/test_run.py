import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import attach
from pipework.attached import to_sequential
from pipework.model.parts.adapter import SideOutputs
from pipework.model.parts.run import AbsenceWatch, Message, PartRun
from pipework.model.parts.trace import PartSpan, Trace
from tests.model.parts.models import WIDTH, Plain


def test_a_run_that_is_watched_is_freed_when_it_ends() -> None:
    span = PartSpan(Trace("Net"), 0, 0, is_last=True)
    run = PartRun(span, Message.first(((), {})), torch.device("cpu"), SideOutputs())
    run.watch = AbsenceWatch(run)
    freed = weakref.ref(run)
    del run  # no cycle keeps it, and its tensors, until Python looks for cycles
    assert freed() is None


WORDS = torch.arange(2)


class Switch(nn.Linear):
    """Changes in place what it is given, once that is switched on."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2) if self.on else x)


class Deciding(nn.Module):
    """Does something else for the input 2."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.layers[1] = Switch(WIDTH, WIDTH)
        self.what = what

    def forward(self, x: Tensor, words: Tensor, other: int = 1) -> Tensor:
        first, second, third = self.layers
        y = first(x)
        z = second(y)
        if other == 2:
            if self.what == "input":
                words.mul_(2)
            elif self.what == "call":
                y.mul_(2)
            elif self.what == "more":
                z = second(z)
            elif self.what != "unit":
                return third(z) + first(y) if self.what == "again" else third(y)
        return third(z)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("input", "forward changes input words in place, as it did not for the sample"),
        ("call", r"forward changes layers.0#0 in place, as it did not for the sample"),
        ("unit", r"layers.1#0 changes in place what it is given, as it did not for the sample"),
        ("more", r"forward calls layers.1 more often than for the sample"),
        ("again", r"forward calls layers.0 more often than for the sample"),
        ("absent", r"layers.2#0 reads a tensor that it did not read for the sample, and which was not sent"),
    ],
)
def test_another_way_than_that_of_the_sample(what: str, message: str) -> None:
    x = torch.randn(2, WIDTH)
    model = Deciding(what)
    parts = to_sequential(model, {"x": x, "words": WORDS, "other": 1}, balance=[1, 1, 1])

    def run(other: int) -> Tensor:
        model.layers[1].on = (what, other) == ("unit", 2)
        value = parts[0](x=x.clone(), words=WORDS.clone(), other=other)
        for part in list(parts)[1:]:
            value = part(value)
        return value

    run(1)
    with pytest.raises(RuntimeError, match=message):
        run(2)


class Model(nn.Module):
    """Reads what its first unit gave once more at its end, if a flag says so or the data does.

    Args:
        reads: computes with what the first unit gave.
    """

    def __init__(self, reads: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.reads = reads
        self.late = False
        self.first = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        first = hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        if self.late or bool((x > 2).any()):
            hidden = self.reads(hidden, first)
        return nn.functional.mse_loss(self.head(hidden), labels)


WAYS = {
    "an operator": lambda hidden, first: hidden.masked_fill(first > 0, 0.0),
    "in place": lambda hidden, first: (hidden * 2).add_(first),
    "a number": lambda hidden, first: hidden * (1.0 if first.sum() > 0 else 2.0),
    "at the end": lambda hidden, first: hidden.where(first.isnan(), hidden),
}


def batch(largest: float = 1.0) -> dict[str, Tensor]:
    return {"x": torch.linspace(-1, largest, 32).view(8, 4), "labels": torch.linspace(1, -1, 32).view(8, 4)}


@pytest.mark.parametrize("late", [False, True], ids=["by the data", "by a flag, after the watched micro-batches"])
@pytest.mark.parametrize("way", WAYS)
def test_a_later_batch_that_takes_another_way(way: str, late: bool) -> None:
    model = Model(WAYS[way])
    attach(model, batch(), chunks=4, balance=[3, 2], devices=["cpu"] * 2)
    for _ in range(5 if late else 1):
        model(**batch()).backward()
    model.late = late
    with pytest.raises(RuntimeError, match="reads a tensor that it did not read for the sample"):
        model(**batch(1.0 if late else 3.0))
    model.late = False
    model(**batch()).backward()


@pytest.mark.parametrize("way", WAYS)
def test_a_sample_that_takes_the_way(way: str) -> None:
    model = Model(WAYS[way])
    model.late = True
    attach(model, batch(), chunks=4, balance=[3, 2], devices=["cpu"] * 2)
    loss = model(**batch())
    pieces = zip(batch()["x"].chunk(4), batch()["labels"].chunk(4), strict=True)
    del model.forward
    assert torch.equal(loss, torch.stack([model(*piece) for piece in pieces]).mean())


class ChangingOnce(Plain):
    """Changes its input in place, and only the first layer reads it."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(x.add_(1.0), labels)


def test_later_parts_change_an_input_in_place_that_they_do_not_get() -> None:
    model, x, labels = ChangingOnce(), torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    expected = model(x.clone(), labels)
    attach(model, {"x": x.clone(), "labels": labels}, chunks=2, balance=[1, 1, 2])
    found = model(x=x.clone(), labels=labels)
    torch.testing.assert_close(found["loss"], expected["loss"])
