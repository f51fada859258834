"""Costs: the time of each action on each stage, and the memory that a micro-batch holds."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

Cost = float | Sequence[float]
"""One number for all stages, or a number for each stage."""

# The costs whose sequences do not have a number for each stage, but for each of these.
_PLACES: Final[Mapping[str, str]] = MappingProxyType(
    {"transfer": "boundary", "message": "boundary", "skip_transfer": "skip"}
)


StageCosts = Mapping[str, tuple[float, ...]]
"""The attributes of :class:`Costs` with a number for each stage, boundary or skip, see :meth:`Costs.spread`."""


@dataclass(frozen=True)
class Costs:
    """Time and memory of the actions, each as one number for all stages or a sequence with a number for each stage.

    All times have one unit, all memories have one unit; both are free, and predictions have the same.

    Attributes:
        forward: time of ``F``.
        backward: time of ``B``; None: that of both halves.
        recompute: time of ``R``; None: that of ``forward``.
        input_gradient: time of ``I``; None: half of ``backward``, or 1 if that is None, too.
        weight_gradient: time of ``W``; None: half of ``backward``, or 1 if that is None, too.
        reduce_gradient: time of ``REDUCE_GRAD``, which adds up a stage's gradients over replicas of the model.
        unshard: time of ``UNSHARD``, which gathers a stage's weights that processes share; its worker waits.
        weights: memory that these weights take from ``UNSHARD`` to ``RESHARD``.
        transfer: time for a value, or its gradient, to cross a boundary between two workers; a sequence has one number
            for each boundary, one fewer than stages. Between stages of one worker there is no transfer.
        skip_transfer: the same for a skip connection; a sequence has a number for each skip of the schedule.
        offload: time of ``O``, which copies what a micro-batch holds on a stage to the memory of the host. If the
            micro-batch is checkpointed, it takes the share ``checkpoint_activation / activation`` of that.
        reload: the same of ``L``, which copies it back.
        activation: memory that a micro-batch holds on a stage from the start of ``F`` (if checkpointed, of ``R``) to
            the end of ``B`` (or ``W``); if checkpointed, also during ``F``, which is computed with its graph.
        checkpoint_activation: memory that a checkpointed micro-batch holds from the end of ``F`` to the start of
            ``R``.
        waiting: memory that a micro-batch holds from the end of ``I`` to the end of ``W``; None: ``activation``.
        offloaded: memory of a micro-batch that stays on the device from ``O`` to ``L``.
        checkpoint_offloaded: the same of a checkpointed one; None: ``offloaded``, at most ``checkpoint_activation``.
        message: memory of a micro-batch's value that crosses a boundary; a sequence has a number for each boundary. It
            is for information only: the time of a transfer is ``transfer``.

    Raises:
        TypeError: a cost is no number.
        ValueError: a number is negative, infinite or NaN, or a sequence is empty.

    Example:
        >>> Costs(forward=[1, 2]).spread(stages=2)["forward"]
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
    unshard: Cost = 0.0
    weights: Cost = 0.0
    transfer: Cost = 0.0
    skip_transfer: Cost = 0.0
    offload: Cost = 0.0
    reload: Cost = 0.0
    activation: Cost = 1.0
    checkpoint_activation: Cost = 0.0
    waiting: Cost | None = None
    offloaded: Cost = 0.0
    checkpoint_offloaded: Cost | None = None
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

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Read costs from a file that :meth:`save` has written.

        Args:
            path: a file of JSON, an object with the names of the attributes.

        Raises:
            ValueError: the file is no such object, or a number is out of range.
            TypeError: a cost is no number.
            OSError: the file cannot be read.

        Example:
            >>> Costs.load("no such file.json")
            Traceback (most recent call last):
            FileNotFoundError: [Errno 2] No such file or directory: 'no such file.json'
        """
        try:
            values = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        except ValueError as error:
            raise ValueError(f"{path} is not JSON in UTF-8: {error}") from None
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not known.issuperset(values):
            raise ValueError(f"{path}: wanted an object with some of the names {', '.join(sorted(known))}")
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the costs as JSON, for :meth:`load` and for `python -m pipework compare --costs FILE`.

        Args:
            path: should end in ``.json``, by which the command line recognises the file.

        Raises:
            OSError: the file cannot be written.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     Costs(forward=[1, 2]).save(f"{folder}/costs.json")
            ...     Costs.load(f"{folder}/costs.json").forward
            (1.0, 2.0)
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = {name: value for name, value in values.items() if value is not None}
        Path(path).write_text(json.dumps(given, indent=2) + "\n", encoding="utf-8")

    def placed(self, placement: Sequence[int]) -> Costs:
        """Costs of stages, if these are those of workers' whole shares and the stages of a worker are equal.

        Numbers are divided by the stages of a worker, but for those of transfers and messages. A sequence with a number
        for each worker is spread: each stage gets the number of its worker, divided by the stages of that worker. For
        transfers and messages such a sequence has a number for each pair of adjacent workers; a boundary between other
        workers, such as from the last to the first, gets the largest of them. Sequences of other lengths, such as those
        with a number for each stage, stay.

        Args:
            placement: the worker of each stage.

        Example:
            >>> costs = Costs(forward=[2, 4], transfer=[0.5]).placed((0, 1, 0, 1))
            >>> costs.forward, costs.activation, costs.transfer
            ((1.0, 2.0, 1.0, 2.0), 0.5, (0.5, 0.5, 0.5))
            >>> Costs(forward=[2, 4], transfer=[0.5]).placed((0, 1, 1, 0)).transfer
            (0.5, 0.0, 0.5)
        """
        count = Counter(placement)
        workers, parts = len(count), [count[worker] for worker in placement]
        found: dict[str, Cost] = {}
        for field in fields(self):
            value, place = getattr(self, field.name), _PLACES.get(field.name, "stage")
            if value is None and self.backward is None and field.name in ("input_gradient", "weight_gradient"):
                value = 1.0  # what an unset half takes, however many stages there are, is divided as well
            if place == "stage" and isinstance(value, float):
                found[field.name] = value / parts[0] if len(set(parts)) == 1 else tuple(value / each for each in parts)
            elif workers == len(placement) or not isinstance(value, tuple):
                continue
            elif place == "stage" and len(value) == workers:
                found[field.name] = tuple(value[worker] / count[worker] for worker in placement)
            elif place == "boundary" and len(value) == workers - 1:
                found[field.name] = tuple(_crossing(value, *both) for both in pairwise(placement))
        return replace(self, **found)

    def spread(self, stages: int, skips: int = 0) -> StageCosts:
        """Give each stage, boundary and skip its costs; those that are None follow from the others.

        Args:
            stages: number of stages.
            skips: number of skip connections of the schedule.

        Returns:
            The name of each attribute to its numbers.

        Raises:
            ValueError: a sequence has another length.

        Example:
            >>> Costs(transfer=0.5).spread(stages=3)["transfer"]
            (0.5, 0.5)
            >>> Costs(forward=[1, 2]).spread(stages=3)
            Traceback (most recent call last):
            ValueError: Costs: forward has 2 numbers: wanted 3, one for each stage, or a single number for all
        """
        counts = {"boundary": stages - 1, "skip": skips}
        found: dict[str, tuple[float, ...]] = {}
        for field in fields(self):
            value, place = getattr(self, field.name), _PLACES.get(field.name, "stage")
            count = counts.get(place, stages)
            if isinstance(value, tuple) and len(value) != count:
                raise ValueError(
                    f"Costs: {field.name} has {len(value)} number{'s' if len(value) != 1 else ''}: wanted {count}, "
                    f"one for each {place}, or a single number for all"
                )
            if value is not None:
                found[field.name] = value if isinstance(value, tuple) else (value,) * count
        half = tuple(time / 2 for time in found.get("backward", (2.0,) * stages))
        halves = [found.setdefault(name, half) for name in ("input_gradient", "weight_gradient")]
        found.setdefault("backward", tuple(map(sum, zip(*halves, strict=True))))
        found.setdefault("recompute", found["forward"])
        found.setdefault("waiting", found["activation"])
        stays = tuple(map(min, found["offloaded"], found["checkpoint_activation"]))
        found.setdefault("checkpoint_offloaded", stays)
        return found


def checked(costs: Costs | None) -> Costs:
    """The costs; unit costs for None.

    Raises:
        TypeError: the argument is something else.

    Example:
        >>> checked(3)
        Traceback (most recent call last):
        TypeError: costs is 3: wanted Costs(...), such as Costs(forward=1, backward=2)
    """
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        raise TypeError(f"costs is {costs!r}: wanted Costs(...), such as Costs(forward=1, backward=2)")
    return costs


def checked_without_skips(costs: Costs | None) -> Costs:
    """The costs for orders and bounds, which do not depend on skips: these are added to a finished schedule.

    Raises:
        TypeError: as :func:`checked`.

    Example:
        >>> checked_without_skips(Costs(skip_transfer=[1, 2])).skip_transfer
        0.0
    """
    return replace(checked(costs), skip_transfer=0.0)


def copy_time(costs: StageCosts, name: str, stage: int, *, inputs: bool) -> float:
    """The time of a copy to or from the host.

    Args:
        costs: the times and the memory of each stage.
        name: ``"offload"`` or ``"reload"``.
        stage: the stage.
        inputs: whether the micro-batch is recomputed, so that only its input is copied.

    Example:
        >>> copy_time(Costs(offload=4, checkpoint_activation=0.25).spread(1), "offload", 0, inputs=True)
        1.0
    """
    time, whole = costs[name][stage], costs["activation"][stage]
    return time * costs["checkpoint_activation"][stage] / whole if inputs and whole else time


def _crossing(values: Sequence[float], source: int, target: int) -> float:
    """The cost of a boundary between two workers, from numbers for each pair of adjacent workers."""
    if source == target:
        return 0.0
    return values[min(source, target)] if abs(source - target) == 1 else max(values)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"Costs: {name} is {value!r}: wanted a number, or a sequence of numbers")
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"Costs: {name} is {value!r}: wanted a finite number of at least 0")
    return float(value)
