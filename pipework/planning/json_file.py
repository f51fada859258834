"""Plans and profiles are saved as JSON and read again; each error names the file."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, Self


class SavedAsJson(ABC):
    """An object that is written as JSON, with a line for each field.

    The field "format" is ``pipework plan 1`` for the class `Plan`.
    """

    @abstractmethod
    def _written(self) -> dict[str, Any]:
        """The fields, in terms of JSON."""

    @classmethod
    @abstractmethod
    def _read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """The arguments of the class, from the fields."""

    def to_json(self) -> str:
        """The text that `save` writes to a file of JSON."""
        fields = {"format": f"pipework {type(self).__name__.lower()} 1", **self._written()}
        return "{" + ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items()) + "}\n"

    def save(self, path: str | Path) -> None:
        """Write it as JSON, for :meth:`load`.

        Raises:
            OSError: the file cannot be written.
        """
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what :meth:`save` has written as JSON.

        Raises:
            ValueError: the file holds something else.
            OSError: it cannot be read.
        """
        return cls.from_json(Path(path).read_bytes(), str(path))

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> Self:
        """What :meth:`to_json` returned; `name` says in messages where the text is from.

        Raises:
            ValueError: the text is something else.
        """
        what = cls.__name__.lower()
        form = f"pipework {what} 1"
        try:
            fields = json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
            if not isinstance(fields, dict) or fields.pop("format", None) != form:
                raise ValueError(f"wanted an object of format {form!r}, as its save(path) writes it")
            return cls(**cls._read(fields))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as error:
            reason = f"it has no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{name} is no {what}: {reason}") from None


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
