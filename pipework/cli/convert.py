"""`python -m pipework convert`: write the model of a checkpoint as one file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipework.cli.report import Report

if TYPE_CHECKING:
    from pipework.cli.draw import Commands


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "convert",
        help="write the model of a checkpoint as one safetensors file",
        description="Write the model of a checkpoint, saved by any number of stages, as one safetensors file: "
        "parameters and buffers under the names in the state dict of the module before partitioning.",
        epilog="example: python -m pipework convert checkpoints/step-00000012 model.safetensors",
    )
    parser.add_argument("checkpoint", type=Path, metavar="STEP_DIR", help="the directory of a step")
    parser.add_argument("out", type=Path, metavar="OUT", help="the file to write; its name ends in .safetensors")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

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
