"""Schedules as text: JSON, which keeps all that a schedule has, and the CSV of `torch.distributed.pipelining`.

CSV has a row for each worker and a cell for each action. In files of PyTorch, an empty cell is a step in which a rank
is idle, and `0WAIT_SEND_F0` is a wait for what was sent.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Final

from pipework.schedule.action import Action
from pipework.schedule.kinds import KINDS, Kinds
from pipework.schedule.schedule import Schedule

_FORMAT: Final = "pipework schedule 1"

_OVERLAP: Final = re.compile(r"\((.*)\)OVERLAP_F_B")
_WAIT: Final = re.compile(r"[0-9]+WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)")


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
        "placement": schedule.placement,
        "inference": schedule.inference,
        "skips": schedule.skips,
    }
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    # A line for each worker, so that people can read it and tools can compare it.
    orders = ",\n  ".join(json.dumps([str(action) for action in order]) for order in schedule.orders)
    return f'{{{head},\n "orders": [{orders}]}}'


def from_json(text: str, *, table: Kinds = KINDS) -> Schedule:
    """Read what :func:`to_json` wrote.

    Args:
        text: the JSON itself.
        table: the kinds of actions that there are, which the JSON does not have.

    Raises:
        TypeError: the text is no str.
        ValueError: the text is not JSON, or not that of a schedule.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> from_json(to_json(fill_drain(3, 5))) == fill_drain(3, 5)
        True
    """
    try:
        fields = json.loads(_checked_text(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f"the JSON is not a schedule of pipework: wanted an object of format {_FORMAT!r}")
    if type(fields.get("inference")) is not bool:
        raise ValueError(f"the JSON makes no schedule: inference is {fields.get('inference')!r}, wanted a bool")
    try:
        orders = [[Action.parse(str(action), table) for action in order] for order in fields["orders"]]
        return Schedule(fields["name"], fields["placement"], orders, fields["inference"], fields["skips"], table)  # type: ignore[arg-type]
    except KeyError as error:
        raise ValueError(f"the JSON makes no schedule: it has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON makes no schedule: {error}") from None


def to_csv(schedule: Schedule) -> str:
    """Write the orders for `torch.distributed.pipelining`, which loads them with `_load_csv`.

    PyTorch adds transfers and reductions of gradients to a file without them (its format `compute_only`). To write them
    as well (`compute_comms`), pass a schedule that has them: see :func:`with_gradient_reduction` and
    :func:`with_communication`.

    Args:
        schedule: its name is not written, since the format has no place for it. PyTorch loads no recomputation (use
            :func:`without_recompute` before) and no copies to the host.

    Returns:
        A row for each worker, a cell for each action.

    Raises:
        ValueError: the schedule has skips, for which the format has no place.

    Example:
        >>> from pipework.schedule import fill_drain, with_communication
        >>> print(to_csv(with_communication(fill_drain(2, 1), channel="worker")))
        0F0,0SEND_F0,0RECV_B0,0B0
        1RECV_F0,1F0,1B0,1SEND_B0
        <BLANKLINE>
    """
    if schedule.skips:
        raise ValueError(
            f"schedule {schedule.name!r} has skip connections, which PyTorch's CSV does not support: write the "
            "schedule without them, or as JSON"
        )
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(schedule.orders)
    return text.getvalue()


def from_csv(text: str, *, name: str = "csv", table: Kinds = KINDS) -> Schedule:
    """Read what :func:`to_csv` or `torch.distributed.pipelining` wrote.

    A forward and a backward side by side (``OVERLAP_F_B``) are read as one after the other, as PyTorch runs them. Waits
    are left out: here an action waits for what it needs.

    Args:
        text: the CSV itself.
        name: the name of the schedule.
        table: the kinds of actions that there are.

    Raises:
        TypeError: the text is no str.
        ValueError: a cell is no action, a row has none, or a stage is in two rows or in none; the message names the
            place. Whether the schedule can be executed is checked by :func:`validate`.

    Example:
        >>> from_csv("0F0,,0B0").orders
        ((Action(kind='F', stage=0, micro_batch=0), Action(kind='B', stage=0, micro_batch=0)),)
    """
    reader = csv.reader(io.StringIO(_checked_text(text)))
    try:
        orders = [list(_actions(cells, row, table)) for row, cells in enumerate(reader, start=1)]
    except csv.Error as error:
        raise ValueError(f"the text is not CSV: {error}") from None
    while orders and not orders[-1]:
        orders.pop()
    if not all(orders) or not orders:
        row = 1 + next((worker for worker, order in enumerate(orders) if not order), 0)
        raise ValueError(f"row {row} of the CSV has no action: wanted those of a worker, such as 0F0,0B0")
    inference = all(table[action.kind].phase != "backward" for order in orders for action in order)
    try:
        return Schedule(name, _placement(orders), orders, inference, table=table)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"the CSV makes no schedule: {error}") from None


def _checked_text(text: str) -> str:
    """The text without the byte-order mark with which spreadsheets begin."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a schedule is {text!r}: wanted a str, such as Path('a.json').read_text()")
    return text.removeprefix("\ufeff")


def _actions(cells: Iterable[str], row: int, table: Kinds) -> Iterator[Action]:
    for column, cell in enumerate(map(str.strip, cells), start=1):
        overlap = _OVERLAP.fullmatch(cell)
        for text in overlap[1].split(";") if overlap else [cell] if cell else []:
            try:
                if _WAIT.fullmatch(text.strip()) is None:
                    yield Action.parse(text, table)
            except ValueError as error:
                raise ValueError(f"row {row}, column {column} of the CSV: {error}") from None


def _placement(orders: Iterable[Iterable[Action]]) -> tuple[int, ...]:
    """The worker of each stage: the number of the row that computes it."""
    place: dict[int, int] = {}
    for worker, order in enumerate(orders):
        for action in order:
            if place.setdefault(action.stage, worker) != worker:
                raise ValueError(
                    f"row {worker + 1} has {action}, row {place[action.stage] + 1} has others of this stage: "
                    "wanted all of them in one row"
                )
    missing = next((stage for stage in range(max(place)) if stage not in place), None)
    if missing is not None:
        raise ValueError(f"stage {missing} has no action, though stage {max(place)} has: number stages without a gap")
    return tuple(place[stage] for stage in sorted(place))
