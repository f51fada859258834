"""What readers of schedules have in common: text in, a schedule out, or one kind of error that says where."""

from __future__ import annotations

from collections.abc import Sequence

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule


def whole_text(text: str, ending: str) -> str:
    """The text without a byte-order mark; refused if it is no text, or the name of a file.

    Args:
        text: what a reader was given.
        ending: of the names of files that it reads.

    Raises:
        TypeError: not a str.
        ValueError: the name of a file.

    Example:
        >>> whole_text("a.csv", ".csv")
        Traceback (most recent call last):
        ValueError: the text is 'a.csv', which looks like the name of a file: pass what is in it, \
Path('a.csv').read_text()
    """
    if not isinstance(text, str):
        raise TypeError(f"the text of a schedule is {text!r}: wanted a str, such as Path('a{ending}').read_text()")
    if "\n" not in text.strip() and text.strip().lower().endswith(ending):
        raise ValueError(
            f"the text is {text!r}, which looks like the name of a file: pass what is in it, "
            f"Path({text.strip()!r}).read_text()"
        )
    return text.removeprefix("\ufeff")


def made(
    form: str,
    name: str,
    placement: Sequence[int],
    orders: Sequence[Sequence[Action]],
    *,
    inference: bool,
    skips: Sequence[tuple[int, ...]] = (),
) -> Schedule:
    """The schedule of what was read.

    Args:
        form: what it was read from, for the message.
        name: and so on: as for a `Schedule`.
        placement: the worker of each stage.
        orders: the actions of each worker.
        inference: whether nothing goes back.
        skips: pairs of stages.

    Raises:
        ValueError: it makes none.

    Example:
        >>> made("JSON", "tiny", [], [[Action("F", 0, 0)]], inference=True)
        Traceback (most recent call last):
        ValueError: the JSON makes no schedule: placement is empty: give the worker of each stage, such as (0, 1) for \
two stages
    """
    try:
        return Schedule(name, tuple(placement), tuple(map(tuple, orders)), inference, skips)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ValueError(f"the {form} makes no schedule: {error}") from None
