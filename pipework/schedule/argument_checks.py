"""Checks of the arguments that generators, schedules and passes take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from pipework.schedule.action import Action
from pipework.schedule.kinds import Kinds


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
        TypeError: placement is 3: wanted a sequence such as (0, 1)
    """
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}: wanted a sequence such as {example}")
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
    close = get_close_matches(name.lower(), names, n=1) if isinstance(name, str) else []
    hint = f"did you mean {close[0]!r}? Choose" if close else "choose"
    return f"no {what} is called {name!r}: {hint} one of {', '.join(map(repr, names))}"


def one_of(name: str, value: object, choices: Iterable[object]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ValueError: it is none of them.

    Example:
        >>> one_of("channel", "tube", ("pair", "worker"))
        Traceback (most recent call last):
        ValueError: channel is 'tube': wanted one of 'pair', 'worker'
    """
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} is {value!r}: wanted one of {', '.join(map(repr, choices))}")


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
        if worker < 0 or (workers is not None and worker >= workers):
            orders = "" if workers is None else f"; there are orders for {workers} workers"
            raise ValueError(f"stage {stage} is placed on worker {worker}: wanted workers numbered from 0{orders}")
    idle = set(range(max(placement) + 1 if workers is None else workers)) - set(placement)
    if idle:
        raise ValueError(f"worker {min(idle)} holds no stage: place a stage on it, or leave its order out")


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
        pair = tuple(skip) if isinstance(skip, Sequence) else ()
        if list(map(type, pair)) != [int, int]:
            raise TypeError(f"a skip is {skip!r}: wanted a pair of stages, from and to, such as (0, 2)")
        pairs.append((pair[0], pair[1]))
    return tuple(pairs)


def check_order(worker: int, order: Sequence[Action], stages: int, table: Kinds, *, inference: bool) -> None:
    """Refuse items that are no actions, and actions whose kind, stage, micro-batch or peer is out of range.

    Raises:
        TypeError: an item is no action, or its numbers are not ints.
        ValueError: a kind or number is out of range.
    """
    kinds = {row.letter: row.scope for row in table.values() if not inference or row.phase != "backward"}
    for action in order:
        if type(action) is not Action or not type(action[1]) is type(action[2]) is type(action[3]) is int:
            raise TypeError(f"{action!r} in worker {worker}'s order: wanted an Action such as Action('F', 0, 0)")
        kind, stage, micro_batch, peer = action
        if kind not in kinds:
            which = f"{', '.join(kinds)}{', since the schedule is for inference' if inference else ''}"
            raise ValueError(f"{action!r} in worker {worker}'s order: kind must be one of {which}")
        if not 0 <= stage < stages:
            raise ValueError(f"{action} in worker {worker}'s order: placement has the stages 0 to {stages - 1}")
        scope = kinds[kind]
        if (micro_batch < 0) != (scope == "stage") or (0 <= peer < stages) != (scope == "transfer"):
            raise ValueError(
                f"{action!r} in worker {worker}'s order: {kind} wants "
                f"{'no micro-batch' if scope == 'stage' else 'a micro-batch from 0 on'}, and "
                f"{f'a peer from 0 to {stages - 1}' if scope == 'transfer' else 'no peer'}"
            )
