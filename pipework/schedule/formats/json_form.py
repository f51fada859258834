"""Schedules as JSON, which keeps all that a schedule has."""

from __future__ import annotations

import json
from typing import Any, Final

from pipework.schedule.action import Action
from pipework.schedule.formats.reading import made, whole_text
from pipework.schedule.schedule import Schedule

_FORMAT: Final = "pipework schedule 1"


def to_json(schedule: Schedule) -> str:
    """Write all that a schedule has, as JSON that :func:`from_json` reads.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> print(to_json(fill_drain(1, 1)))
        {"format": "pipework schedule 1",
         "name": "gpipe",
         "placement": [0],
         "inference": false,
         "skips": [],
         "orders": [["0F0", "0B0"]]}
    """
    fields = {
        "format": _FORMAT,
        "name": schedule.name,
        "placement": list(schedule.placement),
        "inference": schedule.inference,
        "skips": [list(skip) for skip in schedule.skips],
    }
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    # A line for each worker, so that people can read it and tools can compare it.
    orders = ",\n  ".join(json.dumps([str(action) for action in order]) for order in schedule.orders)
    return f'{{{head},\n "orders": [{orders}]}}'


def from_json(text: str) -> Schedule:
    """Read what :func:`to_json` wrote.

    Raises:
        TypeError: the text is no str.
        ValueError: the text is not JSON, or not that of a schedule.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> from_json(to_json(fill_drain(3, 5))) == fill_drain(3, 5)
        True
    """
    try:
        fields = json.loads(whole_text(text, ".json"))
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        found = (
            f"its format is {fields.get('format')!r}"
            if isinstance(fields, dict)
            else f"it is a {type(fields).__name__}"
        )
        raise ValueError(f"the JSON is not a schedule of pipework: {found}, wanted an object of format {_FORMAT!r}")
    orders = _field(fields, "orders", list)
    return made(
        "JSON",
        _field(fields, "name", str),
        _field(fields, "placement", list),
        [_order(order, worker) for worker, order in enumerate(orders)],
        inference=_field(fields, "inference", bool),
        skips=[_skip(skip) for skip in _field(fields, "skips", list)],
    )


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields.get(name), kind):
        raise ValueError(f"the JSON has {fields.get(name)!r} for {name!r}: wanted a {kind.__name__}")
    return fields[name]


def _skip(skip: object) -> tuple[int, ...]:
    if not isinstance(skip, list):
        raise ValueError(f"the JSON has {skip!r} for a skip: wanted a pair of stages, from and to, such as [0, 2]")
    return tuple(skip)


def _order(order: object, worker: int) -> list[Action]:
    if not isinstance(order, list):
        raise ValueError(f'the JSON has {order!r} for the order of worker {worker}: wanted a list such as ["0F0"]')
    return [_parsed(action, worker) for action in order]


def _parsed(action: object, worker: int) -> Action:
    if not isinstance(action, str):
        raise ValueError(
            f'the JSON has {action!r} for an action in the order of worker {worker}: wanted a string such as "0F0"'
        )
    try:
        return Action.parse(action)
    except ValueError as error:
        raise ValueError(f"the order of worker {worker} in the JSON: {error}") from None
