"""Reads files of JSON that this package has written, with an error that names the file for all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any


def read_json(
    text: str, name: str, what: str, form: str, written_by: str, make: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The arguments for what was written.

    Args:
        text: of the file.
        name: of the file, for messages.
        what: should be in it, such as "profile".
        form: the text of its field "format".
        written_by: the call that writes such files, for messages.
        make: from the fields to the arguments.

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
        raise ValueError(f"{name} is not JSON: {error}") from None
    found = f"its format is {fields.get('format')!r}" if isinstance(fields, dict) else "it is no object"
    if not isinstance(fields, dict) or fields.pop("format", None) != form:
        raise ValueError(f"{name} is no {what}: {found}, wanted the format {form!r}, as {written_by} writes it")
    try:
        return make(fields)
    except KeyError as error:
        raise ValueError(f"{name} is no whole {what}: it has no {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{name} is no {what}: {error}") from None
