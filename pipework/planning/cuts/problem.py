"""What a search for cuts is given: layers, stages, workers and their limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class CutProblem:
    """Consecutive layers to be cut into stages, each of at least one layer.

    A worker's load is the time that it computes for one micro-batch: that of the layers of its stages, and what
    crossing the boundaries of its stages adds. Seconds and bytes may be in any other unit, too.

    Attributes:
        placement: the worker of each stage.
        seconds: for each stage, the seconds that each layer takes there for one micro-batch: its forward, its backward
            and its recomputation.
        memory: for each stage, the bytes that each layer costs there: weights, gradients, optimizer, and activations
            of all micro-batches in flight. Empty: no layer needs any.
        limits: the bytes of each worker, which may be infinite; None: no limits.
        boundary: the seconds that each side needs for sending and receiving, which its load grows by: for each
            boundary, between stage s and s + 1, a number for each layer but the last, after which the cut may be; or
            one number for all. Between stages of one worker nothing is sent, and nothing is added.

    Raises:
        ValueError: the sequences do not fit together, a number is negative, infinite or NaN, or there are fewer layers
            than stages.

    Example:
        >>> CutProblem(placement=(0, 1), seconds=[[1, 2, 3]] * 2).layers
        3
        >>> CutProblem(placement=(0, 1), seconds=[[1], [1]])
        Traceback (most recent call last):
        ValueError: 2 stages need at least 2 layers, got 1
    """

    placement: tuple[int, ...]
    seconds: Sequence[Sequence[float]]
    memory: Sequence[Sequence[float]] = ()
    limits: Sequence[float] | None = None
    boundary: Sequence[Sequence[float]] | float = 0.0

    def __post_init__(self) -> None:
        workers = set(self.placement)
        if not workers or workers != set(range(len(workers))):
            raise ValueError(f"placement is {self.placement}: wanted a worker for each stage, numbered from 0 on")
        _check_rows("seconds", self.seconds, self.stages, self.layers, "stage")
        if len(self.memory):
            _check_rows("memory", self.memory, self.stages, self.layers, "stage")
        if self.limits is not None:
            if len(self.limits) != self.workers:
                raise ValueError(f"limits has {len(self.limits)} numbers: wanted {self.workers}, one for each worker")
            for worker, limit in enumerate(self.limits):
                if not limit > 0:
                    raise ValueError(f"limits of worker {worker} is {limit!r}: wanted a positive number")
        if isinstance(self.boundary, Sequence):
            _check_rows("boundary", self.boundary, self.stages - 1, self.layers - 1, "boundary")
        else:
            _check_numbers("boundary", [self.boundary])
        if self.layers < self.stages:
            raise ValueError(f"{self.stages} stages need at least {self.stages} layers, got {self.layers}")

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.placement)

    @cached_property
    def workers(self) -> int:
        """The number of workers."""
        return len({*self.placement})

    @cached_property
    def held(self) -> list[list[int]]:
        """The stages of each worker."""
        stages: list[list[int]] = [[] for _ in range(self.workers)]
        for stage, worker in enumerate(self.placement):
            stages[worker].append(stage)
        return stages

    @property
    def layers(self) -> int:
        """The number of layers."""
        return len(self.seconds[0]) if len(self.seconds) else 0

    def renumbered(self) -> CutProblem:
        """The same problem with workers numbered in the order of their first stages.

        Example:
            >>> CutProblem((1, 0, 0, 1), [[1, 2, 3, 4]] * 4, limits=[10, 20]).renumbered().placement
            (0, 1, 1, 0)
        """
        order = list(dict.fromkeys(self.placement))
        limits = self.limits if self.limits is None else [self.limits[worker] for worker in order]
        return replace(self, placement=tuple(map(order.index, self.placement)), limits=limits)


def _check_rows(name: str, rows: Sequence[Sequence[float]], count: int, length: int, place: str) -> None:
    if len(rows) != count:
        raise ValueError(f"{name} has {len(rows)} rows: wanted {count}, one for each {place}")
    seen: set[int] = set()  # rows are often one and the same object
    for index, row in enumerate(rows):
        if id(row) in seen:
            continue
        seen.add(id(row))
        if len(row) != length:
            raise ValueError(f"{name} of {place} {index} has {len(row)} numbers: wanted {length}")
        _check_numbers(f"{name} of {place} {index}", row)


def _check_numbers(name: str, row: Sequence[float]) -> None:
    for index, value in enumerate(row):
        if not (0 <= value < math.inf):
            raise ValueError(f"{name}: number {index} is {value!r}: wanted a finite number of at least 0")
