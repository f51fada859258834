"""The orders of a schedule as text, for tests, bug reports and files."""

from __future__ import annotations

from pipework.schedule.action import Action
from pipework.schedule.formats.reading import made, whole_text
from pipework.schedule.schedule import Schedule


def to_orders_text(schedule: Schedule) -> str:
    """Write all that a schedule has, as text that :func:`from_orders_text` reads.

    Example:
        >>> from pipework.schedule import fill_drain
        >>> to_orders_text(fill_drain(1, 1)).splitlines()
        ['schedule gpipe', 'placement 0', 'worker 0 0F0 0B0']
    """
    lines = [f"schedule {schedule.name}", "placement " + " ".join(map(str, schedule.placement))]
    if schedule.skips:
        lines.append("skips " + " ".join(f"{source}-{target}" for source, target in schedule.skips))
    if schedule.inference:
        lines.append("inference")
    for worker, order in enumerate(schedule.orders):
        lines.append(" ".join(["worker", str(worker), *map(str, order)]))
    return "\n".join(lines)


def from_orders_text(text: str) -> Schedule:
    r"""Read what :func:`to_orders_text` wrote; empty lines and lines that begin with ``#`` are skipped.

    Raises:
        TypeError: the text is no str.
        ValueError: a line cannot be read (the message has its number), or the lines make no schedule.

    Example:
        >>> from_orders_text("schedule tiny\nplacement 0\nworker 0 0F0 0B0").orders
        ((Action(kind='F', stage=0, micro_batch=0), Action(kind='B', stage=0, micro_batch=0)),)
    """
    name: str | None = None
    placement: tuple[int, ...] | None = None
    orders: list[tuple[Action, ...]] = []
    inference = False
    skips: tuple[tuple[int, ...], ...] = ()
    for number, line in enumerate(whole_text(text, ".txt").splitlines(), start=1):
        head, _, rest = line.strip().partition(" ")
        if not head or head.startswith("#"):
            continue
        try:
            if head == "schedule" and name is None:
                name = rest
            elif head == "placement" and placement is None:
                placement = tuple(_number(word, "worker") for word in rest.split())
            elif head == "skips" and not skips:
                skips = tuple(map(_skip, rest.split()))
            elif head == "inference" and not rest:
                inference = True
            elif head == "worker" and rest.split()[:1] == [str(len(orders))]:
                orders.append(tuple(Action.parse(word) for word in rest.split()[1:]))
            else:
                raise ValueError(
                    "wanted 'schedule NAME', 'placement W W ..', 'skips S-S ..' (each of them once), 'inference' or "
                    f"'worker {len(orders)} ACTION ..'"
                )
        except ValueError as error:
            raise ValueError(f"line {number}, {line!r}: {error}") from None
    if name is None or placement is None:
        missing = "schedule" if name is None else "placement"
        raise ValueError(f"the text has no line that begins with '{missing}': the schedule is not complete")
    return made("text", name, placement, orders, inference=inference, skips=skips)


def _number(word: str, what: str) -> int:
    if not (word.isascii() and word.isdigit()):
        raise ValueError(f"{word!r} is no {what}: wanted a number from 0 on")
    return int(word)


def _skip(word: str) -> tuple[int, ...]:
    ends = word.split("-")
    if len(ends) != 2:
        raise ValueError(f"{word!r} is no skip: wanted two stages, from and to, such as 0-2")
    return tuple(_number(end, "stage") for end in ends)
