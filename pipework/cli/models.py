"""`python -m pipework plan` and `convert`: a plan for the profile of a model, and a checkpoint as one file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipework.cli.arguments import Report, add_command, add_options
from pipework.planning.profiles import Profile
from pipework.planning.search import plan_profile

if TYPE_CHECKING:
    from pipework.cli.arguments import Commands

_ENDINGS = (".json", ".csv", ".svg")
_EXAMPLE = "python -m pipework plan profile.json --workers 8 --memory 24GiB --batch 64 -o plan.json -o plan.svg"


def add_to(commands: Commands) -> None:
    """Add the commands to a parser."""
    text = "choose cut, micro-batches, schedule, recomputation and order of devices for a profile of a model"
    more = "pipework.planning.profile(model, sample).save(FILE) measures a profile. Example: " + _EXAMPLE
    parser = add_command(commands, "plan", plan, text, more)
    parser.add_argument("profile", type=Path, metavar="FILE", help="the profile")
    add_options(parser, "--workers", help="so many devices of the profile's only kind")
    options: dict[str, tuple[Callable[[str], Any], str, str]] = {
        "--devices": (parts, "A,B,...", "one for each worker instead: devices of the profile, or kinds of device"),
        "--memory": (memory, "SIZE", "the most that a device may hold, such as 24GiB; NAME=SIZE,NAME=SIZE for "
                     "different ones; workers on one device share it evenly"),
        "--batch": (int, "N", "rows of a mini-batch (default: the profile's)"),
        "--chunks": (counts, "N,N,...", "numbers of micro-batches to try"),
        "--schedules": (parts, "A,B,...", "choose among these schedules only"),
        "--iterations": (int, "N", "try so many candidates, not some seconds of them: always the same plan"),
        "--optimizer": (float, "N", "numbers that the optimizer keeps for each parameter (default 2, as Adam)"),
        "--seconds": (float, "S", "time to search (default 30)"),
    }  # fmt: skip
    for name, (read, metavar, about) in options.items():
        parser.add_argument(name, type=read, metavar=metavar, help=about)
    about = f"write the plan ({', '.join(_ENDINGS)}); may be given several times"
    parser.add_argument("-o", "--output", type=Path, action="append", metavar="FILE", help=about)
    parser.add_argument("--no-offload", dest="offload", action="store_false", help="leave activations on their devices")
    parser.add_argument("--quiet", action="store_true", help="print the plan only")
    parser.set_defaults(optimizer=2.0, seconds=30.0, output=[])

    text = "write the model of a checkpoint, saved by any number of stages, as one safetensors file"
    more = "Example: python -m pipework convert checkpoints/step-00000012 model.safetensors"
    parser = add_command(commands, "convert", convert, text, more)
    parser.add_argument("checkpoint", type=Path, metavar="STEP_DIR", help="the directory of a step")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write; its name ends in .safetensors")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")


def parts(text: str) -> list[str]:
    """What is between commas, for argparse."""
    return [each.strip() for each in text.split(",") if each.strip()]


def counts(text: str) -> list[int]:
    """Numbers between commas, for argparse."""
    return [int(each) for each in parts(text)]


def memory(text: str) -> str | dict[str, str]:
    """A size, or a size for each name, for argparse."""
    pairs = [each.partition("=") for each in parts(text)]
    if "=" in text and not all(equals for _, equals, _ in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: wanted NAME=SIZE,NAME=SIZE, or one SIZE for all")
    return {name.strip(): size.strip() for name, _, size in pairs} if "=" in text else text


def plan(arguments: argparse.Namespace) -> Report:
    """Plan a pipeline.

    Raises:
        ValueError: an argument is out of range, the file is no profile, or no plan fits.
        OSError: a file cannot be read or written.
    """
    for path in arguments.output:
        if path.suffix not in _ENDINGS or not path.parent.is_dir():  # before a long search
            raise ValueError(f"-o {path}: wanted a name in a folder that exists, which ends in one of {_ENDINGS}")
    profile = Profile.load(arguments.profile)
    named = arguments.devices
    if (named is None) == (arguments.workers is None) or (named is None and len(profile.kinds) > 1):
        kinds = ", ".join(map(repr, profile.kinds))
        raise ValueError(f"give --workers if the profile has one kind of device, or else --devices; it has {kinds}")
    names = ("batch", "chunks", "optimizer", "schedules", "offload", "seconds", "iterations")
    found = plan_profile(
        profile,
        [*profile.kinds] * int(arguments.workers) if named is None else named,
        arguments.memory,
        **{name: getattr(arguments, name) for name in names},
        progress=(lambda line: None) if arguments.quiet else (lambda line: print(line, file=sys.stderr, flush=True)),
    )
    for path in arguments.output:
        found.save(path)
    return Report([str(found)])


def convert(arguments: argparse.Namespace) -> Report:
    """Write the model of a checkpoint as one file.

    Raises:
        ValueError: the directory is not that of a step, or the name of the file does not end in ``.safetensors``.
        OSError: the checkpoint is damaged, or the file cannot be written or exists already.
        ImportError: safetensors is not installed.
    """
    if arguments.out.suffix != ".safetensors":
        raise ValueError(f"{arguments.out}: wanted a name that ends in .safetensors")
    from pipework.saving import convert  # imports torch, which the other commands do not need

    done = convert(arguments.checkpoint, arguments.out, force=arguments.force)
    return Report([f"{arguments.out}: {done.tensors} tensors, {done.bytes:,} bytes, of step {done.step}"])
