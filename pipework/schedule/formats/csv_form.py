"""Schedules as CSV, in the forms of `torch.distributed.pipelining`: a row for each worker, a cell for each action.

The form ``"compute_only"`` has forwards and backwards; an empty cell is a step in which PyTorch leaves a rank idle.
The form ``"compute_comms"`` also has transfers, reductions of gradients over replicas, and gathers of sharded weights.
In PyTorch 2.15 the latter has waits, too, for what was sent and reduced: ``"compute_comms_waits"``.
"""

from __future__ import annotations

import csv
import functools
import io
import re
from collections.abc import Iterable, Iterator
from typing import Final, Literal, get_args

from pipework.schedule.action import Action
from pipework.schedule.formats.reading import made, whole_text
from pipework.schedule.passes.communication import with_communication, with_gradient_reduction
from pipework.schedule.schedule import Schedule

Form = Literal["compute_only", "compute_comms", "compute_comms_waits"]
"""The name of a form of CSV."""

_OVERLAP: Final = re.compile(r"\((.*)\)OVERLAP_F_B")
_WAIT: Final = re.compile(r"[0-9]+WAIT_(SEND_[FB][0-9]+|REDUCE_GRAD)")


def to_csv(schedule: Schedule, *, form: Form = "compute_only") -> str:
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
    if form not in get_args(Form):
        raise ValueError(f"form is {form!r}: wanted one of {', '.join(map(repr, get_args(Form)))}")
    foreign = next((action for order in schedule.orders for action in order if action.kind == "R"), None)
    if foreign is not None:
        raise ValueError(
            f"schedule {schedule.name!r} recomputes ({foreign}), which PyTorch's CSV does not support: write the "
            "schedule as it was before with_recompute(), or as JSON"
        )
    if schedule.skips:
        raise ValueError(
            f"schedule {schedule.name!r} has skip connections, which PyTorch's CSV does not support: write it as JSON"
        )
    if form != "compute_only":
        schedule = _lowered(schedule)
    elif any(action.peer >= 0 or action.micro_batch < 0 for order in schedule.orders for action in order):
        raise ValueError(
            f"schedule {schedule.name!r} has more than forwards and backwards: choose form='compute_comms', or write "
            "it as it was before the passes"
        )
    text = io.StringIO()
    cells = _with_waits if form == "compute_comms_waits" else functools.partial(map, str)
    csv.writer(text, lineterminator="\n").writerows(map(cells, schedule.orders))
    return text.getvalue()


def _lowered(schedule: Schedule) -> Schedule:
    """The schedule with the actions that PyTorch adds before it runs one."""
    kinds = {action.kind for order in schedule.orders for action in order}
    if "REDUCE_GRAD" not in kinds and not schedule.inference:
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
    try:
        lines = list(csv.reader(io.StringIO(whole_text(text, ".csv"))))
    except csv.Error as error:
        raise ValueError(f"the text is not CSV: {error}") from None
    while lines and not any(map(str.strip, lines[-1])):
        lines.pop()
    if not lines:
        raise ValueError("the CSV is empty: wanted a row of actions, such as 0F0,0B0, for each worker")
    orders = tuple(tuple(_actions(cells, number)) for number, cells in enumerate(lines, start=1))
    empty = next((number for number, order in enumerate(orders, start=1) if not order), None)
    if empty is not None:
        raise ValueError(
            f"row {empty} of the CSV has no action: wanted those of worker {empty - 1}; every row is a worker"
        )
    kinds = {action.kind for order in orders for action in order}
    return made("CSV", name, _placement(orders), orders, inference=not kinds & {"B", "I", "W"})


def _actions(cells: Iterable[str], row: int) -> Iterator[Action]:
    for column, cell in enumerate(cells, start=1):
        cell = cell.strip()
        # A forward and a backward side by side; PyTorch, too, runs one after the other.
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
            if action.stage in place and place[action.stage] != worker:
                raise ValueError(
                    f"stage {action.stage} is in row {place[action.stage] + 1} of the CSV and, with {action}, in "
                    f"row {worker + 1}: wanted all its actions in one row"
                )
            place[action.stage] = worker
    gap = next((stage for stage in range(len(place)) if stage not in place), None)
    if gap is not None:
        raise ValueError(
            f"stage {gap} has no action in the CSV, though stage {max(place)} has: number the stages without a gap"
        )
    return tuple(place[stage] for stage in range(len(place)))
