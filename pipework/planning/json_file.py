"""Reads plans and profiles that were saved as JSON, and names the file in each error."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

Made = TypeVar("Made")


def read_file(path: str | Path) -> str:
    """The text of a file.

    Raises:
        ValueError: the file holds no text.
        OSError: the file cannot be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not JSON: it holds no text") from None


def read_json(text: str, name: str, what: str, make: Callable[[dict[str, Any]], Made]) -> Made:
    """Make an object of its fields in JSON, whose field "format" is ``pipework WHAT 1``.

    Args:
        text: of the file.
        name: of the file, for messages.
        what: the text should be: "plan" or "profile".
        make: makes the object of the fields.

    Raises:
        ValueError: the text is not JSON, or has another format, or its fields are wrong.

    Example:
        >>> read_json('{"format": "pipework plan 1", "rows": [1]}', "p.json", "plan", lambda fields: fields)
        {'rows': [1]}
        >>> read_json("[1]", "p.json", "plan", lambda fields: fields)
        Traceback (most recent call last):
        ValueError: p.json is no plan: wanted an object of format 'pipework plan 1', as its save(path) writes it
    """
    form = f"pipework {what} 1"
    try:
        fields = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{name} is not JSON: {error}; wanted a {what}, as its save(path) writes it") from None
    except RecursionError:
        raise ValueError(f"{name} is no {what}: it is nested too deeply") from None
    if not isinstance(fields, dict) or fields.pop("format", None) != form:
        raise ValueError(f"{name} is no {what}: wanted an object of format {form!r}, as its save(path) writes it")
    try:
        return make(fields)
    except KeyError as error:
        raise ValueError(f"{name} is no {what}: it has no {error}") from None
    except (TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(f"{name} is no {what}: {error}") from None


def write_json(what: str, fields: dict[str, Any], more: str = "") -> str:
    """The text for `read_json`, a line for each field.

    Args:
        what: the text is: "plan" or "profile".
        fields: what it has.
        more: another field, as it is to be written.

    Example:
        >>> print(write_json("plan", {"rows": [1, 2]}))
        {"format": "pipework plan 1",
         "rows": [1, 2]}
        <BLANKLINE>
    """
    lines = {"format": f"pipework {what} 1", **fields}
    text = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in lines.items()]
    return "{" + ",\n ".join([*text, *([more] if more else [])]) + "}\n"


def check_numbers(what: str, numbers: Iterable[object]) -> None:
    """Refuse what is no finite number of at least 0.

    Raises:
        ValueError: a number is negative, infinite or NaN, or no number.

    Example:
        >>> check_numbers("seconds", [1, 0.5, "1"])
        Traceback (most recent call last):
        ValueError: the seconds have '1': wanted finite numbers of at least 0
    """
    for each in numbers:
        if isinstance(each, bool) or not isinstance(each, int | float) or not (isfinite(each) and each >= 0):
            raise ValueError(f"the {what} have {each!r}: wanted finite numbers of at least 0")
