"""`python -m pipework draw`: the picture of a schedule, in the terminal or as an SVG file."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipework.schedule import SCHEDULES, Costs, Schedule, build, simulate, svg, with_recompute
from pipework.schedule.units import memory_text, time_text

if TYPE_CHECKING:
    from pipework.schedule.svg import Colors

    # The subparsers' class has no public name at run time.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "draw",
        help="draw a schedule, as text or as an SVG file",
        description="Draw the predicted timeline of a schedule: as text, or with --out as an SVG picture. "
        "Times and memory are of a worker's whole share of the model, however many stages it holds.",
        epilog="example: python -m pipework draw gpipe --workers 4 --chunks 4 --out pipe.svg",
    )
    whole = "through all of a worker's stages"
    parser.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--workers", type=_count, required=True, metavar="N", help="number of workers")
    parser.add_argument("--chunks", type=_count, required=True, metavar="N", help="number of micro-batches")
    parser.add_argument("--stages-per-worker", type=_count, metavar="N", help="for schedules of several (default 2)")
    parser.add_argument(
        "--forward", type=float, default=1.0, metavar="TIME", help=f"time of a forward {whole} (default 1)"
    )
    parser.add_argument(
        "--backward", type=float, default=2.0, metavar="TIME", help=f"time of a backward {whole} (default 2)"
    )
    parser.add_argument("--transfer", type=float, default=0.0, metavar="TIME", help="time between workers (default 0)")
    parser.add_argument(
        "--checkpoint",
        choices=("never", "except_last", "always"),
        default="never",
        help="which micro-batches are recomputed (default never)",
    )
    parser.add_argument(
        "--colors",
        choices=("worker", "action"),
        help="what SVG colours tell: the worker, with update boxes (default with one stage per worker), "
        "or the kind of action, with memory (default with several)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="write an SVG picture")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> list[str]:
    """Draw.

    Returns:
        Lines for the terminal.

    Raises:
        ValueError: what was asked for cannot be drawn.
        OSError: the file cannot be written.
    """
    out: Path | None = arguments.out
    if out is not None:
        _check_file(out)
    schedule = _schedule(arguments)
    each = schedule.stages / schedule.workers
    costs = Costs(
        forward=arguments.forward / each,
        backward=arguments.backward / each,
        transfer=arguments.transfer,
        activation=1 / each,
    )
    simulation = simulate(schedule, costs)
    line = simulation.timeline
    peak = max(simulation.peak_memory)
    facts = f"bubble {100 * line.bubble:.1f} %, makespan {time_text(line.makespan, line.unit)}, peak memory "
    share = "stage" if each == 1 else "worker"
    if out is None:
        # A pipe or a file has no width of its own.
        width = shutil.get_terminal_size(fallback=(160, 24)).columns
        text = schedule.to_text(costs, max_width=max(40, width))
        return [line.title, text, f"{facts}{memory_text(peak, '')} (in micro-batches of activations of a {share})"]
    line = replace(line, memory_unit="micro-batches")
    colors: Colors = arguments.colors or ("worker" if each == 1 else "action")
    picture = svg(line, colors=colors, update=colors == "worker")
    out.write_text(picture, encoding="utf-8")
    return [f"wrote {out}: {line.title}, {facts}{memory_text(peak, line.memory_unit)}"]


def _schedule(arguments: argparse.Namespace) -> Schedule:
    schedule = build(
        arguments.schedule,
        workers=arguments.workers,
        chunks=arguments.chunks,
        stages_per_worker=arguments.stages_per_worker,
    )
    count = schedule.micro_batches
    return with_recompute(schedule, {"never": 0, "except_last": count - 1, "always": count}[arguments.checkpoint])


def _check_file(out: Path) -> None:
    if out.suffix.lower() != ".svg":
        raise ValueError(f"--out is {str(out)!r}: the name must end in .svg")
    if not out.parent.is_dir():
        raise ValueError(f"--out is {str(out)!r}: there is no folder {str(out.parent)!r}; make it first")


def _count(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: wanted an integer of at least 1")
    return value
