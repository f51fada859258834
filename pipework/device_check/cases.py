"""The ways to train that are tried on a device, or across a link."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

CPU: Final = torch.device("cpu")

# From these values further cases are drawn.
SETTINGS: Final[Mapping[str, tuple[Any, ...]]] = {
    "way": ("outside", "gpipe", "1f1b", "zb-h1"),
    "checkpoint": ("never", "except_last", "always"),
    "dropout": (True, False),
    "skip": (True, False),
    "autocast": (True, False, False),
    "input_gradient": (True, False),
    "delayed": ("nothing", "caller", "layers", "copies"),
}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        devices: of the workers, each with one stage.
        way: the schedule, with the loss inside; or "outside", with the default schedule.
        checkpoint: of the pipe.
        batch_on: the device of the caller's inputs and targets.
        pinned: whether these lie in pinned memory of the host.
        dropout: whether layers draw.
        skip: whether the first layer hands a tensor to the last one.
        autocast: whether it is on for all devices, to bfloat16.
        input_gradient: whether the inputs require one.
        delayed: the streams that long kernels keep busy: "nothing", the "caller"'s, those of "layers" or of "copies".
    """

    devices: tuple[torch.device, ...]
    way: str
    checkpoint: str
    batch_on: torch.device
    pinned: bool = False
    dropout: bool = True
    skip: bool = False
    autocast: bool = False
    input_gradient: bool = False
    delayed: str = "nothing"

    def __str__(self) -> str:
        loss = "loss outside" if self.way == "outside" else f"{self.way}, loss inside"
        pinned = " (pinned)" if self.pinned else ""
        flags = [name for name in ("dropout", "skip", "autocast", "input_gradient") if getattr(self, name)]
        return (
            f"stages on {' '.join(map(str, self.devices))}, {loss}, checkpoint {self.checkpoint}, "
            f"batch on {self.batch_on}{pinned}, with {', '.join(flags) or 'nothing else'}, delayed: {self.delayed}"
        )


def first_cases(source: torch.device, destination: torch.device) -> list[Case]:
    """The cases that are always run; `source` is `destination` for those of a device.

    Example:
        >>> [case.way for case in first_cases(CPU, CPU)]
        ['outside', '1f1b', 'gpipe', 'zb-h1', 'outside', 'zb-h1']
    """
    if source == destination:
        here = source
        return [
            Case((here,), "outside", "never", here, input_gradient=True),
            Case((here,) * 2, "1f1b", "except_last", here, delayed="layers"),
            Case((here,) * 4, "gpipe", "always", here, delayed="caller"),
            Case((here,) * 2, "zb-h1", "never", here, dropout=False),
            Case((here,) * 4, "outside", "except_last", here, dropout=False, skip=True, delayed="layers"),
            Case((here,) * 2, "zb-h1", "always", here, autocast=True, input_gradient=True),
        ]
    two = (source, destination)
    return [
        Case(two, "1f1b", "except_last", source, input_gradient=True, delayed="copies"),
        Case(two, "outside", "never", destination, dropout=False, skip=True, delayed="caller"),
        Case(two, "zb-h1", "always", CPU, pinned=True, delayed="layers"),  # the host does not wait for pinned memory
        Case((*two, source), "zb-h1", "except_last", source, skip=True, autocast=True),
    ]


def further_cases(source: torch.device, destination: torch.device) -> Iterator[Case]:
    """Cases without end, whose settings are drawn; the same ones each time."""
    draw = random.Random(f"{source} {destination}")
    stages = (1, 2, 3, 4) if source == destination else (2, 3, 4)
    while True:
        devices = tuple((source, destination)[number % 2] for number in range(draw.choice(stages)))
        settings = {name: draw.choice(values) for name, values in SETTINGS.items()}
        case = Case(devices, batch_on=draw.choice((source, destination)), **settings)
        pins = {source, destination} != {CPU} and draw.random() < 0.2
        yield replace(case, batch_on=CPU, pinned=True) if pins else case
