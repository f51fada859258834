"""Lets the ways of a case take turns, and says what each of them took."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks import harness
from benchmarks.gpu.card import Card, same_bits_twice
from benchmarks.gpu.ways import Way

WRONG = 5e-2  # of a tensor's largest element: no rounding of bfloat16
Batch = tuple[Any, Any]


@dataclass(frozen=True)
class Case:
    """What is measured together.

    Attributes:
        batch: the mini-batch and its target.
        short: the same with few tokens, with which gradients are compared bit by bit.
        tokens: of the mini-batch.
        flops: of a step.
        ways: makes each of them, by its name; the first is the plain model. None: it is left out here.
    """

    batch: Batch
    short: Batch
    tokens: int
    flops: float
    ways: Mapping[str, Callable[[], Way | None]]


@dataclass
class Measured:
    """What a way took.

    Attributes:
        seconds: of each round, until the device had ended.
        host: of each round, until the host had launched the step.
        sms: on which it computed.
        ours: whether it is pipework's.
        gib: parameters, and the most that a step took beside them; 0 on the CPU.
        mfu: model FLOPs in relation to the peak of these SMs; None: the peak is not known.
        tokens: in a second.
        ideal: see `Way.ideal`.
        bubble: recorded.
        predicted: the bubble of the simulation with the recorded times.
        difference: of the gradients from those of the plain model, as a share of the largest element of each tensor;
            None: they could not be compared.
        bitwise: whether they were computed so that they can be equal to the last bit.
        actions: that the host launches in a step of a pipe.
    """

    seconds: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    sms: int = 0
    ours: bool = False
    gib: float = 0.0
    mfu: float | None = None
    tokens: float = 0.0
    ideal: float | None = None
    bubble: float | None = None
    predicted: float | None = None
    difference: float | None = None
    bitwise: bool = True
    actions: int = 0


@dataclass
class Outcome:
    """Of a case: what its ways took, by name, and the errors of those that failed."""

    measured: dict[str, Measured] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def measure(case: Case, card: Card, rounds: int, seconds: float) -> Outcome:
    """Makes the ways, compares their gradients, and lets them take turns.

    Args:
        case: which ways.
        card: on which.
        rounds: at most so many for each.
        seconds: about how long all rounds may take; at least three are made.
    """
    outcome, ways = Outcome(), dict[str, Way]()
    for name, make in case.ways.items():
        try:
            way = make()
            if way is None:
                continue
            for _ in range(way.warm_up):
                way.clear()
                before = card.used()
                way.run(*case.batch)
                if way.captures:  # a replay allocates nothing of what it takes
                    way.grown = max(way.grown, card.most_used() - before)
            card.synchronize()
            ways[name] = way
        except Exception as error:
            _note(outcome, name, error)
    if not ways:
        return outcome
    outcome.measured = {
        name: Measured(sms=way.sms, ours=way.ours, ideal=way.ideal(), actions=way.actions) for name, way in ways.items()
    }
    candidates = {name: _candidate(way, case.batch, card, outcome.measured[name]) for name, way in ways.items()}
    once = sum(candidate() for candidate in candidates.values())
    for each in outcome.measured.values():
        each.seconds.clear()
        each.host.clear()
    harness.alternate(candidates, min(rounds, max(3, int(seconds / once))), warm_up=0)
    for name, way in ways.items():
        each = outcome.measured[name]
        time = median(each.seconds)
        each.tokens = case.tokens / time
        each.mfu = None if card.peak is None else case.flops / time / (card.peak * way.sms / card.sms)
        try:
            _record(way, case.batch, each)
        except Exception as error:
            _note(outcome, f"{name}, recorded", error)
    _compare(case, ways, outcome)
    return outcome


def _note(outcome: Outcome, name: str, error: Exception) -> None:
    """Prints what went wrong, with its place, and keeps it in one line."""
    traceback.print_exception(error)
    outcome.errors[name] = f"{type(error).__name__}: {error}".partition("\n")[0]


def _candidate(way: Way, batch: Batch, card: Card, times: Measured) -> harness.Candidate:
    def run() -> float:
        way.clear()
        before = card.used()
        seconds, host = card.timed(way.run, *batch)
        grown = way.grown if way.graph or way.captures else card.most_used() - before
        if card.is_gpu:
            weights = sum(parameter.nbytes for parameter in way.model.parameters())
            times.gib = max(times.gib, (weights + grown) / 2**30)
        times.seconds.append(seconds)
        times.host.append(host)
        return seconds

    return run


def _record(way: Way, batch: Batch, into: Measured) -> None:
    """Records a step of a pipe whose actions are launched one by one."""
    if way.pipe is None or way.graph:
        return
    with way.pipe.record(memory=False) as recording:
        way.clear()
        way.run(*batch)
    into.bubble, into.predicted = recording.bubble(), recording.predicted().bubble


def _compare(case: Case, ways: Mapping[str, Way], outcome: Outcome) -> None:
    """Compares the gradients of all ways with those of the first.

    Bit by bit with few tokens, and attention whose backward gives the same bits twice. A graph has its mini-batch in
    it, and the attention that is measured: there rounding is allowed.
    """
    plain = next(iter(ways.values()))
    with same_bits_twice():
        exact = plain.gradients(*case.short)
    full = plain.gradients(*case.batch) if any(way.graph for way in ways.values()) else []
    for name, way in ways.items():
        each = outcome.measured[name]
        if not way.is_compared:
            continue
        try:
            if way.graph:
                each.bitwise, apart = False, difference(way.gradients(*case.batch), full)
            else:
                with same_bits_twice():
                    apart = difference(way.gradients(*case.short), exact)
            each.difference = apart
            assert apart <= WRONG, f"other gradients: they differ by {apart:.3g}"
        except Exception as error:
            _note(outcome, name, error)


def difference(got: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of two lists of tensors, in relation to the largest element of each.

    Infinite if something is NaN, or was to be 0.
    """
    assert [each.shape for each in got] == [each.shape for each in wanted], "gradients of other parameters"
    worst = 0.0
    for one, other in zip(got, wanted, strict=True):
        apart, largest = float((one.float() - other.float()).abs().max()), float(other.abs().max())
        if apart != 0.0:
            worst = max(worst, apart / largest) if apart < math.inf and largest > 0.0 else math.inf
    return worst
