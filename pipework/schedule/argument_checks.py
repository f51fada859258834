"""Checks of the arguments that generators, schedules and passes take."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pipework.schedule.action import KINDS, NONE, OF_STAGES, TRANSFERS, Action

if TYPE_CHECKING:
    from pipework.schedule.schedule import Schedule

_FORWARD_ONLY = ("F", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
_EVERY_KIND = (*KINDS, *TRANSFERS, *OF_STAGES)
_PART = 4096  # actions of an order that are checked together


def positive_integers(**values: object) -> None:
    """Refuse everything but ints that are at least 1, by name.

    Raises:
        TypeError: not an int, or a bool.
        ValueError: less than 1.

    Example:
        >>> positive_integers(workers=0)
        Traceback (most recent call last):
        ValueError: workers is 0: wanted an integer of at least 1
    """
    for name, value in values.items():
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}, a {type(value).__name__}: wanted an integer of at least 1")
        if value < 1:
            raise ValueError(f"{name} is {value}: wanted an integer of at least 1")


def checked_tuple(name: str, value: Any, example: str) -> tuple[Any, ...]:
    """Make a tuple of a sequence.

    Raises:
        TypeError: the value is no sequence.

    Example:
        >>> checked_tuple("placement", 3, "(0, 1)")
        Traceback (most recent call last):
        TypeError: placement is 3, an int: wanted a sequence such as (0, 1)
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        kind = type(value).__name__
        article = "an" if kind[0] in "aeiou" else "a"
        raise TypeError(f"{name} is {value!r}, {article} {kind}: wanted a sequence such as {example}")
    return tuple(value)


def unknown_name(what: str, name: object, known: Iterable[str]) -> str:
    """A message about a name that is not known, with a known one that is written nearly like it.

    Args:
        what: what has a name, such as ``"schedule"``.
        name: the argument.
        known: all names.

    Example:
        >>> unknown_name("schedule", "1F1b ", ["gpipe", "1f1b"])
        "no schedule is called '1F1b ': did you mean '1f1b'? Choose one of 'gpipe', '1f1b'"
    """
    names = list(known)
    lower = {each.lower(): each for each in reversed(names)}
    close = get_close_matches(name.lower(), lower, n=1) if isinstance(name, str) else []
    hint = f"did you mean {lower[close[0]]!r}? Choose" if close else "choose"
    return f"no {what} is called {name!r}: {hint} one of {', '.join(map(repr, names))}"


def check_placement(placement: Sequence[int], workers: int | None = None) -> None:
    """Refuse a placement with a worker out of range or without a stage.

    Args:
        placement: the worker of each stage.
        workers: number of workers; None: one more than the highest in the placement.

    Raises:
        TypeError: a worker is not an int.
        ValueError: the placement is empty, a worker is out of range, or a worker has no stage.
    """
    if not placement:
        raise ValueError("placement is empty: give the worker of each stage, such as (0, 1) for two stages")
    for stage, worker in enumerate(placement):
        if type(worker) is not int:
            raise TypeError(f"placement of stage {stage} is {worker!r}: wanted the number of its worker, an int")
    workers = max(placement) + 1 if workers is None else workers
    for stage, worker in enumerate(placement):
        if not 0 <= worker < workers:
            raise ValueError(
                f"stage {stage} is placed on worker {worker}, but there are orders for the workers 0 to {workers - 1}: "
                "correct placement, or give an order for each worker"
            )
    idle = sorted(set(range(workers)) - set(placement))
    if idle:
        raise ValueError(f"worker {idle[0]} holds no stage: place a stage on it, or leave its order out")


def checked_skips(skips: Any) -> tuple[tuple[int, int], ...]:
    """Make pairs of stages of skips.

    Raises:
        TypeError: a skip is no pair of ints.

    Example:
        >>> checked_skips([[0, 2]])
        ((0, 2),)
    """
    pairs = []
    for skip in checked_tuple("skips", skips, "((0, 2),)"):
        pair = tuple(skip) if isinstance(skip, Sequence) and not isinstance(skip, str) else ()
        if len(pair) != 2 or not all(type(stage) is int for stage in pair):
            raise TypeError(f"a skip is {skip!r}: wanted a pair of stages, from and to, such as (0, 2)")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def check_skips(skips: Sequence[tuple[int, int]], stages: int) -> None:
    """Refuse skips that pass over no stage, and duplicates.

    Raises:
        ValueError: a skip passes over no stage, or is there twice.
    """
    for source, target in skips:
        if not 0 <= source < target - 1 < stages - 1:
            raise ValueError(
                f"a skip goes from stage {source} to stage {target}: wanted one that passes over a stage, within "
                f"the stages 0 to {stages - 1}; with_skips() leaves the others out"
            )
    if len(set(skips)) < len(skips):
        raise ValueError(f"skips is {skips!r}: wanted each pair once; all values between two stages share it")


def check_order(worker: int, order: Sequence[Action], stages: int, *, inference: bool) -> None:
    """Refuse items that are no actions, and actions whose kind, stage, micro-batch or peer is out of range.

    Raises:
        TypeError: an item is no action, or its numbers are not ints.
        ValueError: a kind or number is out of range.
    """
    kinds = _FORWARD_ONLY if inference else _EVERY_KIND
    if _computations_only(order, stages, kinds):
        return
    for position, action in enumerate(order):
        if not isinstance(action, Action):
            raise TypeError(
                f"position {position} of worker {worker}'s order is {action!r}: wanted an Action, "
                "such as Action('F', 0, 0)"
            )
        kind, stage, micro_batch, peer = action
        if type(stage) is not int or type(micro_batch) is not int or type(peer) is not int:
            got = ", ".join(type(number).__name__ for number in action[1:])
            raise TypeError(
                f"{action!r} in worker {worker}'s order: wanted an int for stage, micro_batch and peer, got {got}"
            )
        if kind not in kinds:
            which = f"{', '.join(kinds)}, since the schedule is for inference" if inference else ", ".join(kinds)
            raise ValueError(f"{action!r} in worker {worker}'s order: kind must be one of {which}")
        if not 0 <= stage < stages:
            raise ValueError(f"{action} in worker {worker}'s order: placement has the stages 0 to {stages - 1}")
        if (micro_batch < 0) != (kind in OF_STAGES):
            which = "it is done once for all micro-batches" if micro_batch >= 0 else "micro-batches are counted from 0"
            raise ValueError(f"{action!r} in worker {worker}'s order: {which}")
        if (0 <= peer < stages) != (kind in TRANSFERS):
            ends = f"wanted a peer, one of the stages 0 to {stages - 1}" if kind in TRANSFERS else "it has no peer"
            raise ValueError(f"{action!r} in worker {worker}'s order: {ends}")


def _computations_only(order: Sequence[Action], stages: int, kinds: Collection[str]) -> bool:
    """Whether all items are computations without fault: a fast check of the usual case."""
    for start in range(0, len(order), _PART):
        part = order[start : start + _PART]
        if set(map(type, part)) != {Action}:
            return False
        of_part, *numbers = zip(*part, strict=True)
        if set(map(type, of_part)) != {str} or not {*KINDS}.intersection(kinds).issuperset(of_part):
            return False
        if any(set(map(type, each)) != {int} for each in numbers):
            return False
        in_stages, micro_batches, peers = map(set, numbers)
        if min(in_stages) < 0 or max(in_stages) >= stages or min(micro_batches) < 0 or peers != {NONE}:
            return False
    return True


def refuse_kind(schedule: Schedule, kind: str, does: str) -> None:
    """Refuse a schedule that already has the actions that a pass adds.

    Raises:
        ValueError: the schedule has such an action.
    """
    for worker, order in enumerate(schedule.orders):
        for action in order:
            if action.kind == kind:
                raise ValueError(f"worker {worker} {does} already, {action}: pass the schedule without {kind}")


def refuse_whole_stages(whole_stages: object) -> None:
    """Raises a ValueError for what is no number of stages."""
    if isinstance(whole_stages, bool) or not isinstance(whole_stages, int) or whole_stages < 1:
        raise ValueError(
            "whole_stages is how many stages of a worker are whole at most, from 1, or None for all: got "
            f"{whole_stages!r}"
        )
