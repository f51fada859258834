"""Schedules as JSON: everything that a schedule is, for files and other programs."""

from __future__ import annotations

import json
from typing import Any, Final

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule

_FORMAT: Final = "pipework schedule 1"


def to_json(schedule: Schedule) -> str:
    """Write a schedule; see :meth:`Schedule.to_json`.

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
    # A line for each worker, so that people can read it, and tools compare it.
    orders = ",\n  ".join(json.dumps([str(action) for action in order]) for order in schedule.orders)
    return f'{{{head},\n "orders": [{orders}]}}'


def from_json(text: str) -> Schedule:
    """Read what :func:`to_json` wrote; see :meth:`Schedule.from_json`.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> from_json(to_json(fill_drain(3, 5))) == fill_drain(3, 5)
        True
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is no JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        found = (
            f"its format is {fields.get('format')!r}"
            if isinstance(fields, dict)
            else f"it is a {type(fields).__name__}"
        )
        raise ValueError(f"the JSON is no schedule of pipework: {found}, wanted an object of format {_FORMAT!r}")
    return Schedule(
        _field(fields, "name", str),
        tuple(_field(fields, "placement", list)),
        tuple(tuple(_parsed(action) for action in order) for order in _field(fields, "orders", list)),
        _field(fields, "inference", bool),
        tuple(map(tuple, _field(fields, "skips", list))),
    )


def _field(fields: dict[str, Any], name: str, kind: type) -> Any:
    if not isinstance(fields.get(name), kind):
        raise ValueError(f"the JSON has {fields.get(name)!r} for {name!r}: wanted a {kind.__name__}")
    return fields[name]


def _parsed(action: object) -> Action:
    if not isinstance(action, str):
        raise ValueError(f'the JSON has {action!r} for an action: wanted a string such as "0F0"')
    return Action.parse(action)
