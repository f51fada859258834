"""Costs: how long each action of each stage takes, and how much memory a micro-batch holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

from pipework.schedule.checks import positive_integer

Cost = float | Sequence[float]
"""A number that holds for all stages, or one number for each."""

# What a sequence has one number for, where it is not a stage.
_PLACES: Final = {"transfer": "boundary", "message": "boundary", "skip_transfer": "skip"}


class StageCosts(NamedTuple):
    """Costs spelt out for a number of stages, as :meth:`Costs.spread` returns them.

    Attributes:
        duration: action kind to the time of each stage.
        transfer: time of each boundary, between stage s and s + 1.
        activation: memory of a micro-batch on each stage.
        checkpoint_activation: memory of a checkpointed micro-batch on each stage, before it is recomputed.
        message: memory of what crosses each boundary.
        skip: time of each skip, in the order of the schedule's.
    """

    duration: Mapping[str, tuple[float, ...]]
    transfer: tuple[float, ...]
    activation: tuple[float, ...]
    checkpoint_activation: tuple[float, ...]
    message: tuple[float, ...]
    skip: tuple[float, ...] = ()


@dataclass(frozen=True)
class Costs:
    """Time and memory of the actions, each a number for all stages or a sequence with one number for each stage.

    Units are free, as long as all times and all memories have one each; predictions have the same.

    Attributes:
        forward: time of ``F``.
        backward: time of ``B``; None: of both halves together.
        recompute: time of ``R``; None: as ``forward``.
        input_gradient: time of ``I``; None: half of ``backward``, 1 if that is None, too.
        weight_gradient: time of ``W``; None: likewise.
        reduce_gradient: time of ``REDUCE_GRAD``, in which a stage's gradients are added up over a model's replicas.
        transfer: time for a value, or its gradient, to cross a boundary between two workers; a sequence has one number
            for each boundary, one less than stages. Nothing crosses between stages of one worker.
        skip_transfer: the same for a skip connection; a sequence has one number for each of the schedule's skips.
        activation: memory that a micro-batch holds on a stage from the start of ``F`` (if checkpointed, of ``R``) to
            the end of ``B`` (or ``W``); if checkpointed, also during ``F``, which is computed with its graph.
        checkpoint_activation: memory that a checkpointed micro-batch holds from the end of ``F`` to the start of
            ``R``.
        message: memory of what crosses a boundary for one micro-batch; a sequence has one number for each boundary. It
            informs, and decides no time: that is ``transfer``.

    Raises:
        TypeError: not a number.
        ValueError: negative, infinite or NaN.

    Example:
        >>> Costs(forward=[1, 2]).spread(stages=2).duration["F"]
        (1.0, 2.0)
        >>> Costs(backward=-1)
        Traceback (most recent call last):
        ValueError: Costs: backward is -1: wanted a finite number of at least 0
    """

    forward: Cost = 1.0
    backward: Cost | None = None
    recompute: Cost | None = None
    input_gradient: Cost | None = None
    weight_gradient: Cost | None = None
    reduce_gradient: Cost = 0.0
    transfer: Cost = 0.0
    skip_transfer: Cost = 0.0
    activation: Cost = 1.0
    checkpoint_activation: Cost = 0.0
    message: Cost = 0.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            if isinstance(value, Sequence) and not isinstance(value, str):
                place = _PLACES.get(field.name, "stage")
                spread = tuple(_number(f"{field.name} of {place} {index}", each) for index, each in enumerate(value))
                object.__setattr__(self, field.name, spread)
            else:
                object.__setattr__(self, field.name, _number(field.name, value))

    def divided(self, parts: int) -> Costs:
        """Costs of a stage, if these are of a worker's whole share and the worker holds so many equal stages.

        Numbers are divided; sequences, which have a number for each stage, stay, and so does what crosses a boundary.

        Args:
            parts: stages per worker.

        Raises:
            TypeError: not an int.
            ValueError: less than 1.

        Example:
            >>> from pipework.schedule import build, simulate
            >>> schedule = build("zb-v", workers=4, chunks=8)
            >>> [simulate(schedule, costs).makespan for costs in (Costs(), Costs().divided(2))]
            [51.0, 25.5]
        """
        positive_integer("parts", parts)
        whole = self
        if self.backward is None:
            # Halves of which nobody speaks take 1, of whatever.
            inputs = 1.0 if self.input_gradient is None else self.input_gradient
            weights = 1.0 if self.weight_gradient is None else self.weight_gradient
            whole = replace(self, input_gradient=inputs, weight_gradient=weights)
        shared = (field.name for field in fields(self) if field.name not in _PLACES)
        values = ((name, getattr(whole, name)) for name in shared)
        return replace(whole, **{name: value / parts for name, value in values if isinstance(value, float)})

    def spread(self, stages: int, skips: int = 0) -> StageCosts:
        """Spell the costs out for a number of stages.

        Args:
            stages: how many.
            skips: how many skip connections the schedule has.

        Raises:
            ValueError: a sequence of another length.

        Example:
            >>> Costs(transfer=0.5).spread(stages=3).transfer
            (0.5, 0.5)
            >>> Costs(forward=[1, 2]).spread(stages=3)
            Traceback (most recent call last):
            ValueError: Costs: forward has 2 numbers: wanted 3, one for each stage, or a single number for all
        """
        forward = self._each("forward", stages)
        half = (1.0,) * stages if self.backward is None else tuple(time / 2 for time in self._each("backward", stages))
        inputs = half if self.input_gradient is None else self._each("input_gradient", stages)
        weights = half if self.weight_gradient is None else self._each("weight_gradient", stages)
        both = tuple(map(sum, zip(inputs, weights, strict=True)))
        duration = {
            "F": forward,
            "B": both if self.backward is None else self._each("backward", stages),
            "R": forward if self.recompute is None else self._each("recompute", stages),
            "I": inputs,
            "W": weights,
            "REDUCE_GRAD": self._each("reduce_gradient", stages),
        }
        return StageCosts(
            duration,
            self._each("transfer", stages - 1, "boundary"),
            self._each("activation", stages),
            self._each("checkpoint_activation", stages),
            self._each("message", stages - 1, "boundary"),
            self._each("skip_transfer", skips, "skip"),
        )

    def _each(self, name: str, count: int, place: str = "stage") -> tuple[float, ...]:
        value = getattr(self, name)
        if not isinstance(value, tuple):
            return (value,) * count
        if len(value) != count:
            raise ValueError(
                f"Costs: {name} has {len(value)} number{'s' if len(value) != 1 else ''}: wanted {count}, "
                f"one for each {place}, or a single number for all"
            )
        return value


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Costs: {name} is {value!r}: wanted a number, or a sequence of numbers")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"Costs: {name} is {value!r}: wanted a finite number of at least 0")
    return float(value)
