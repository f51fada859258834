"""The ways to train that are tried on a device, or across a link."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Delayed: TypeAlias = Literal["nothing", "caller", "layers", "copies"]

WAYS: Final = ("outside", "gpipe", "1f1b", "zb-h1")
CHECKPOINTS: Final = ("never", "except_last", "always")
DELAYED: Final[tuple[Delayed, ...]] = ("nothing", "caller", "layers", "copies")
CPU: Final = torch.device("cpu")


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
        autocast: whether it is on for all devices.
        input_gradient: whether the inputs require one.
        delayed: the streams that long kernels keep busy: the caller's, those of the layers, those of copies.
    """

    devices: tuple[torch.device, ...]
    way: str = "1f1b"
    checkpoint: str = "never"
    batch_on: torch.device = CPU
    pinned: bool = False
    dropout: bool = True
    skip: bool = False
    autocast: bool = False
    input_gradient: bool = False
    delayed: Delayed = "nothing"

    def __str__(self) -> str:
        flags = {
            "dropout": self.dropout,
            "a skip connection": self.skip,
            "autocast to bfloat16": self.autocast,
            "gradients of the inputs": self.input_gradient,
        }
        loss = "loss outside" if self.way == "outside" else f"{self.way}, loss inside"
        return ", ".join(
            [
                f"stages on {' '.join(map(str, self.devices))}",
                loss,
                f"checkpoint {self.checkpoint}",
                f"batch on {self.batch_on}{' (pinned)' if self.pinned else ''}",
                *(name for name, there in flags.items() if there),
                *([] if self.delayed == "nothing" else [f"delayed: {self.delayed}"]),
            ]
        )


def first_cases(source: torch.device, destination: torch.device) -> list[Case]:
    """The cases that are always run: of a device (`source` is `destination`) every value of every setting.

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
    """Cases without end, whose settings are drawn; the same ones each time.

    Args:
        source: a device.
        destination: of the link; the source itself: the cases are those of a device.
    """
    draw = random.Random(f"{source} {destination}")
    pins = {source, destination} != {CPU}
    stages = [(1, 2, 3, 4), (2, 3, 4)][source != destination]
    while True:
        case = Case(
            tuple((source, destination)[number % 2] for number in range(draw.choice(stages))),
            draw.choice(WAYS),
            draw.choice(CHECKPOINTS),
            draw.choice((source, destination)),
            dropout=draw.random() < 0.5,
            skip=draw.random() < 0.4,
            autocast=draw.random() < 0.3,
            input_gradient=draw.random() < 0.4,
            delayed=draw.choice(DELAYED),
        )
        yield replace(case, batch_on=CPU, pinned=True) if pins and draw.random() < 0.2 else case
