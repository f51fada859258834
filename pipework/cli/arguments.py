"""Arguments that several commands share: counts, costs, memory, files of schedules."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, get_args

from pipework.schedule import Channel, Costs, Schedule, from_csv, from_json
from pipework.schedule.argument_checks import unknown_name
from pipework.schedule.costs import read_costs

DEFAULT_COSTS: Final = "forward=1,backward=2,activation=1"

_COSTS_HELP: Final = (
    "times and memory of a worker's whole share of the model, such as forward=1,input_gradient=1.1,transfer=0.05 "
    "(or F, B, I, W, R, c for the transfer, A for activations), or a .json file with these names, as Costs.save writes "
    "it, in which a list has a number for each worker's whole share, or for each stage (default "
    f"{DEFAULT_COSTS})"
)

_SHORT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "F": "forward",
        "B": "backward",
        "I": "input_gradient",
        "W": "weight_gradient",
        "R": "recompute",
        "c": "transfer",
        "A": "activation",
    }
)

_READERS: Final[Mapping[str, Callable[[str], Schedule]]] = MappingProxyType({".csv": from_csv, ".json": from_json})

FILES: Final = ", ".join(_READERS)


def add_channel(parser: argparse.ArgumentParser, *, default: Channel | None) -> None:
    """Add the option for the transport of transfers.

    Args:
        parser: of a command.
        default: None: no transfers are added to the actions.
    """
    usual, adds = (" (default)", "") if default else ("", "add transfers to the actions, for ")
    parser.add_argument(
        "--channel",
        choices=get_args(Channel),
        default=default,
        help=f"{adds}one of these transports: a channel for each message{usual}, an ordered channel for each pair of "
        "workers, or one ordered channel for each worker",
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    """Add the option for the costs of actions."""
    parser.add_argument("--costs", type=costs, default=Costs(), metavar="COSTS", help=_COSTS_HELP)


def count(text: str) -> int:
    """Read a count, for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count: wanted an integer of at least 1")
    return value


def counts(text: str) -> list[int]:
    """Read counts, separated by commas, for argparse."""
    return [count(each) for each in text.split(",")]


def costs(text: str) -> Costs:
    """Read costs, from pairs or from a file, for argparse."""
    try:
        return Costs(**_named(read_costs(Path(text)).items())) if text.endswith(".json") else written_costs(text)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {text}: {error.strerror}; wanted a file of JSON") from None
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def written_costs(text: str) -> Costs:
    """Read costs from pairs of names, long or short, and numbers.

    Raises:
        ValueError: a name is unknown or given twice, or a value is no number.

    Example:
        >>> written_costs("F=2, transfer=0.5").transfer
        0.5
    """
    return Costs(**_named(map(_pair, text.split(","))))


def limit(text: str) -> float:
    """Read an amount of memory, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount of memory: wanted a number of at least 0")
    return value


def is_file(name: str) -> bool:
    """Whether an argument is the name of a file instead of a schedule."""
    return Path(name).suffix.lower() in _READERS


def read_schedule(file: Path) -> Schedule:
    """Read a schedule from a file, in the format of its suffix.

    Raises:
        ValueError: the file cannot be read or holds no schedule, or its suffix is unknown.
    """
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise ValueError(f"{str(file)!r} is not a file of a schedule: the name must end in one of {FILES}")
    text = _text_of(file, "a schedule")
    try:
        schedule = reader(text)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    # CSV has no name.
    return replace(schedule, name=file.stem) if schedule.name == "csv" else schedule


def _text_of(file: Path, wanted: str) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")  # spreadsheets begin files with a byte-order mark
    except UnicodeDecodeError:
        raise ValueError(f"{file} is not text: wanted {wanted} in UTF-8") from None
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror}; give the path of a file that holds {wanted}") from None


def _named(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Arguments of `Costs`, by their long names."""
    known = {field.name for field in fields(Costs)}
    values: dict[str, Any] = {}
    for name, value in pairs:
        whole = _SHORT.get(name, name)
        if whole not in known:
            raise ValueError(unknown_name("cost", name, [*_SHORT, *sorted(known)]))
        if whole in values:
            raise ValueError(f"{whole} is given twice: give it once")
        values[whole] = value
    return values


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        return name.strip(), float(value)
    except ValueError:
        raise ValueError(f"{text!r} is not a cost: wanted name=number, such as forward=1") from None
