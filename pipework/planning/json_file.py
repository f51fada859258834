"""Reads files of JSON that this package has written, with an error that names the file for all others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def text_of_file(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ValueError: it holds something else than text.
        OSError: it cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not JSON: it holds no text") from None


def read_json(
    text: str, name: str, what: str, form: str, written_by: str, make: Callable[[dict[str, Any]], Made]
) -> Made:
    """What was written.

    Args:
        text: of the file.
        name: of the file, for messages.
        what: should be in it, such as "profile".
        form: the text of its field "format".
        written_by: the call that writes such files, for messages.
        make: makes it of the fields.

    Raises:
        ValueError: the text is not JSON, or not what it should be.

    Example:
        >>> read_json('{"format": "plan 1", "rows": [1]}', "p.json", "plan", "plan 1", "save()", lambda fields: fields)
        {'rows': [1]}
        >>> read_json("[1]", "p.json", "plan", "plan 1", "save()", lambda fields: fields)
        Traceback (most recent call last):
        ValueError: p.json is no plan: it is no object, wanted the format 'plan 1', as save() writes it
    """
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}; wanted a {what}, as {written_by} writes it") from None
    except RecursionError:
        raise ValueError(f"{name} is no {what}: it is nested too deeply") from None
    found = f"its format is {fields.get('format')!r}" if isinstance(fields, dict) else "it is no object"
    if not isinstance(fields, dict) or fields.pop("format", None) != form:
        raise ValueError(f"{name} is no {what}: {found}, wanted the format {form!r}, as {written_by} writes it")
    try:
        return make(fields)
    except KeyError as error:
        raise ValueError(f"{name} is no whole {what}: it has no {error}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{name} is no {what}: {error}") from None


def check_numbers(what: str, numbers: Iterable[object]) -> None:
    """Refuse what is no finite number of at least 0.

    Raises:
        ValueError: it is negative, infinite, NaN, or no number.

    Example:
        >>> check_numbers("seconds", [1, 0.5, "1"])
        Traceback (most recent call last):
        ValueError: the seconds have '1': wanted numbers, and none that is negative, infinite or NaN
    """
    for each in numbers:
        if isinstance(each, bool) or not isinstance(each, int | float) or not (isfinite(each) and each >= 0):
            raise ValueError(f"the {what} have {each!r}: wanted numbers, and none that is negative, infinite or NaN")
