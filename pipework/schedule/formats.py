"""Schedules as text: JSON, which keeps all that a schedule has, and the CSV of `torch.distributed.pipelining`.

CSV has a row for each worker and a cell for each action, in one of three forms. ``"compute_only"`` has forwards and
backwards; an empty cell is a step in which PyTorch leaves a rank idle. ``"compute_comms"`` also has transfers,
reductions of gradients over replicas, and gathers of sharded weights. ``"compute_comms_waits"``, which PyTorch 2.15
wants, also has the waits for what was sent and reduced.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

from pipework.schedule.action import Action
from pipework.schedule.passes.communication import with_communication, with_gradient_reduction
from pipework.schedule.schedule import Schedule

_FORMAT: Final = "pipework schedule 1"

CsvForm = Literal["compute_only", "compute_comms", "compute_comms_waits"]
"""The name of a form of CSV."""

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
        fields = json.loads(_checked_text(text))
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != _FORMAT:
        raise ValueError(f"the JSON is not a schedule of pipework: wanted an object of format {_FORMAT!r}")
    if type(fields.get("inference")) is not bool:
        raise ValueError(f"the JSON makes no schedule: inference is {fields.get('inference')!r}, wanted a bool")
    try:
        orders = [[Action.parse(str(action)) for action in order] for order in fields["orders"]]
        return Schedule(fields["name"], fields["placement"], orders, fields["inference"], fields["skips"])  # type: ignore[arg-type]
    except KeyError as error:
        raise ValueError(f"the JSON makes no schedule: it has no {error}") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"the JSON makes no schedule: {error}") from None


def to_csv(schedule: Schedule, *, form: CsvForm = "compute_only") -> str:
    """Write the orders for `torch.distributed.pipelining`, which loads them with `_load_csv`.

    Args:
        schedule: its name is not written, since the format has no place for it.
        form: ``"compute_only"``: forwards and backwards. ``"compute_comms"``: also transfers and reductions of
            gradients, which are added unless the schedule has them. ``"compute_comms_waits"``: also the waits that
            PyTorch 2.15 wants, and 2.13 does not know.

    Returns:
        A row for each worker, a cell for each action.

    Raises:
        ValueError: an unknown form, or the schedule has actions or skips that PyTorch, or the form, does not support.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> print(to_csv(fill_drain(2, 1), form="compute_comms"))
        0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD
        1RECV_F0,1F0,1B0,1SEND_B0,1REDUCE_GRAD
        <BLANKLINE>
    """
    if form not in get_args(CsvForm):
        raise ValueError(f"form is {form!r}: wanted one of {', '.join(map(repr, get_args(CsvForm)))}")
    if "R" in schedule.kinds or schedule.skips:
        what = "recomputation" if "R" in schedule.kinds else "skip connections"
        raise ValueError(
            f"schedule {schedule.name!r} has {what}, which PyTorch's CSV does not support: write the schedule without "
            "them, or as JSON"
        )
    if form != "compute_only":
        schedule = _lowered(schedule)
    elif not schedule.kinds <= {"F", "B", "I", "W"}:
        raise ValueError(f"schedule {schedule.name!r} has more than computations: choose form='compute_comms'")
    text = io.StringIO()
    rows = (_with_waits(order) if form == "compute_comms_waits" else map(str, order) for order in schedule.orders)
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read what :func:`to_csv` or `torch.distributed.pipelining` wrote, in any form.

    A forward and a backward side by side (``OVERLAP_F_B``) are read as one after the other, as PyTorch runs them. Waits
    are left out: here an action waits for what it needs.

    Args:
        text: the CSV itself.
        name: the name of the schedule.

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
        orders = [list(_actions(cells, row)) for row, cells in enumerate(reader, start=1)]
    except csv.Error as error:
        raise ValueError(f"the text is not CSV: {error}") from None
    while orders and not orders[-1]:
        orders.pop()
    if not all(orders) or not orders:
        row = 1 + next((worker for worker, order in enumerate(orders) if not order), 0)
        raise ValueError(f"row {row} of the CSV has no action: wanted those of a worker, such as 0F0,0B0")
    kinds = {action.kind for order in orders for action in order}
    try:
        return Schedule(name, _placement(orders), orders, inference=not kinds & {"B", "I", "W"})  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"the CSV makes no schedule: {error}") from None


def _checked_text(text: str) -> str:
    """The text without the byte-order mark with which spreadsheets begin."""
    if not isinstance(text, str):
        raise TypeError(f"the text of a schedule is {text!r}: wanted a str, such as Path('a.json').read_text()")
    return text.removeprefix("\ufeff")


def _lowered(schedule: Schedule) -> Schedule:
    """The schedule with the actions that PyTorch adds before it runs one."""
    if "REDUCE_GRAD" not in schedule.kinds and not schedule.inference:
        schedule = with_gradient_reduction(schedule)
    # Depending on the backend, all transfers of a rank share one queue.
    return schedule if schedule.communicates else with_communication(schedule, channel="worker")


def _with_waits(order: Iterable[Action]) -> Iterator[str]:
    """The cells of a row with its waits, which are where PyTorch, too, puts them."""
    pending: dict[Action, str] = {}
    for action in order:
        yield str(action)
        kind, stage, micro_batch, _ = action
        if kind == "REDUCE_GRAD":
            yield f"{stage}WAIT_REDUCE_GRAD"
        elif kind in ("SEND_F", "SEND_B"):
            pending[action] = f"{stage}WAIT_{kind}{micro_batch}"
        elif kind in ("B", "I"):  # its gradient has come back, so the value has arrived
            sent = Action("SEND_F", stage, micro_batch, stage + 1)
            yield from [pending.pop(sent)] if sent in pending else []
    yield from pending.values()


def _actions(cells: Iterable[str], row: int) -> Iterator[Action]:
    for column, cell in enumerate(map(str.strip, cells), start=1):
        overlap = _OVERLAP.fullmatch(cell)
        for text in overlap[1].split(";") if overlap else [cell] if cell else []:
            try:
                if _WAIT.fullmatch(text.strip()) is None:
                    yield Action.parse(text)
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
