"""Helpers of the functions that read schedules."""

from __future__ import annotations

from collections.abc import Sequence

from pipework.schedule.action import Action
from pipework.schedule.schedule import Schedule


def whole_text(text: str, ending: str) -> str:
    """Remove a byte-order mark; refuse the name of a file in place of its content.

    Args:
        text: the argument of the reader.
        ending: the suffix of files in this format.

    Raises:
        TypeError: the text is no str.
        ValueError: the text is the name of a file.

    Example:
        >>> whole_text("a.csv", ".csv")
        Traceback (most recent call last):
        ValueError: the text is 'a.csv', which looks like the name of a file: pass its content, \
Path('a.csv').read_text()
    """
    if not isinstance(text, str):
        raise TypeError(f"the text of a schedule is {text!r}: wanted a str, such as Path('a{ending}').read_text()")
    if "\n" not in text.strip() and text.strip().lower().endswith(ending):
        raise ValueError(
            f"the text is {text!r}, which looks like the name of a file: pass its content, "
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
    """Make a schedule of the fields that were read.

    Raises:
        ValueError: `Schedule` refuses the fields.

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
