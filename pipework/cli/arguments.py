"""What commands share: the table of their options, costs and schedules as arguments, and what a command returns."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, get_args

from pipework.schedule import KINDS, Channel, Costs, Schedule, from_csv, from_json
from pipework.schedule.argument_checks import unknown_name

if TYPE_CHECKING:
    # The subparsers' class has no public name at run time.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

# Short names of costs.
_SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {row.letter: row.cost for row in KINDS.values() if row.scope in ("micro-batch", "copy")}
    | {"c": "transfer", "A": "activation"}
)

FILES: Final = ".csv, .json"


class Report(NamedTuple):
    """The result of a command.

    Attributes:
        lines: what to print.
        status: 0, or 1 if a check did not pass.
    """

    lines: list[str]
    status: int = 0


def costs(text: str) -> Costs:
    """Read costs, from pairs or from a file, for argparse."""
    try:
        return Costs.load(text) if text.endswith(".json") else written_costs(text)
    except (OSError, ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def written_costs(text: str) -> Costs:
    """Read costs from pairs of names, long or short, and numbers.

    Raises:
        ValueError: a name is unknown or given twice, or a value is no number.

    Example:
        >>> written_costs("F=2, transfer=0.5").transfer
        0.5
    """
    known = [field.name for field in fields(Costs)]
    values: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, value = (each.strip() for each in pair.partition("="))
        whole = _SHORT.get(name, name)
        if whole not in known:
            raise ValueError(unknown_name("cost", name, [*_SHORT, *known]))
        if whole in values:
            raise ValueError(f"{whole} is given twice: give it once")
        try:
            values[whole] = float(value)
        except ValueError:
            raise ValueError(f"{pair!r} is not a cost: wanted name=number, such as forward=1") from None
    return Costs(**values)


def read_schedule(file: Path) -> Schedule:
    """Read a schedule from a file, in the format of its suffix.

    Raises:
        ValueError: the file holds no schedule, or its suffix is unknown.
        OSError: the file cannot be read.
    """
    if file.suffix.lower() not in FILES.split(", "):
        raise ValueError(f"{str(file)!r} is not a file of a schedule: the name must end in one of {FILES}")
    try:
        text = file.read_text(encoding="utf-8-sig")  # spreadsheets begin files with a byte-order mark
        return from_csv(text, name=file.stem) if file.suffix.lower() == ".csv" else from_json(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "--workers": {"type": int, "metavar": "N", "help": "number of workers"},
        "--chunks": {"type": int, "metavar": "N", "help": "number of micro-batches"},
        "--stages-per-worker": {"type": int, "metavar": "N", "help": "for schedules that support several (default 2)"},
        "--memory": {
            "type": float, "metavar": "M", "help": "the most memory that a worker may hold, in the unit of the "
            "activations: by default, in micro-batches of a worker's whole share",
        },
        "--costs": {
            "type": costs, "default": Costs(), "metavar": "COSTS", "help": "times and memory of a worker's whole share "
            "of the model, such as forward=1,input_gradient=1.1,transfer=0.05 (or F, B, I, W, R, O, L, c for "
            "the transfer, A for activations), or a .json file of Costs.save, in which a list has a number for each "
            "worker's whole share, or for each stage (default forward=1,backward=2,activation=1)",
        },
        "--channel": {
            "choices": get_args(Channel), "default": "unbounded", "help": "the transport of transfers: a channel for "
            "each message, an ordered channel for each pair of workers, or one ordered channel for each worker",
        },
    }
)  # fmt: skip
"""The options that several commands have."""


def add_options(parser: argparse.ArgumentParser, *names: str, **changes: Any) -> None:
    """Add options of the table to a command, with some of their settings changed."""
    for name in names:
        parser.add_argument(name, **{**OPTIONS[name], **changes})


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], Report], text: str, more: str = ""
) -> argparse.ArgumentParser:
    """Add a command; `more` follows the text in its own help, such as an example."""
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}".strip())
    parser.set_defaults(run=run)
    return parser
