"""`python -m pipework draw`: a schedule as text, as a picture, or in a format for other programs."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pipework.cli import arguments as shared
from pipework.cli.report import Report
from pipework.schedule import (
    SCHEDULES,
    Costs,
    Schedule,
    Timeline,
    grid,
    schedule_spec,
    simulate,
    svg,
    to_csv,
    to_json,
    with_communication,
    with_recompute,
)
from pipework.schedule.draw.units import memory_text, time_text
from pipework.schedule.registry import build_for_shares
from pipework.timeline import trace_json

if TYPE_CHECKING:
    from pipework.schedule.draw.svg import Colors

    # The subparsers' class has no public name at run time.
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


# Browsers are slow with larger pictures, so the command prints their size.
_LARGE: Final = 10 * 2**20


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "draw",
        help="draw a schedule: as text, as a picture, or for other programs",
        description="Draw the predicted timeline of a schedule as text, or with --out as a picture or a file for other "
        "programs. Times and memory are those of a worker's whole share of the model, for any number of stages.",
        epilog="example: python -m pipework draw zb-v --workers 4 --chunks 8 --costs forward=1,backward=2 --out zb.svg",
    )
    parser.add_argument("schedule", help=f"one of {', '.join(SCHEDULES)}; or a file ({shared.FILES})")
    parser.add_argument("--workers", type=shared.count, metavar="N", help="number of workers")
    parser.add_argument("--chunks", type=shared.count, metavar="N", help="number of micro-batches")
    parser.add_argument(
        "--stages-per-worker", type=shared.count, metavar="N", help="for schedules that support several (default 2)"
    )
    shared.add_costs(parser)
    parser.add_argument(
        "--checkpoint",
        choices=("never", "except_last", "always"),
        default="never",
        help="which micro-batches are recomputed (default never)",
    )
    shared.add_channel(parser, default=None)
    parser.add_argument(
        "--colors",
        choices=("worker", "action"),
        help="meaning of the colours of a picture: the worker, with update boxes (default with one stage per worker "
        "and whole backwards), or the kind of action, with memory (default otherwise)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write a picture (.svg), the schedule (.csv in PyTorch's form compute_only, with "
        "--channel in compute_comms; .json), or a trace for https://ui.perfetto.dev (.trace.json)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Run the command.

    Raises:
        ValueError: an argument is out of range, or the file cannot be read or holds no schedule.
        OSError: a file cannot be written.
    """
    out: Path | None = arguments.out
    form = None if out is None else _form(out)
    schedule, costs = _schedule(arguments)
    several = schedule.stages > schedule.workers
    if arguments.channel is not None and not schedule.communicates:
        schedule = with_communication(schedule, costs, channel=arguments.channel)
    simulation = simulate(schedule, costs, channel=arguments.channel or "unbounded")
    line = simulation.timeline
    peak = max(simulation.peak_memory)
    facts = f"bubble {line.bubble:.1%}, makespan {time_text(line.makespan, line.unit)}, peak memory "
    if out is None or form is None:
        # If the output is no terminal, its width is not limited.
        width = shutil.get_terminal_size(fallback=(160, 24)).columns
        text = grid(line, max_width=max(40, width))
        share = "worker" if several else "stage"
        return Report(
            [line.title, text, f"{facts}{memory_text(peak, '')} (in micro-batches of activations of a {share})"]
        )
    line = replace(line, memory_unit="micro-batches")
    # The colours of workers would hide split backwards and the stages of a worker.
    plain = not several and not any(interval.action.kind in "IW" for interval in line.intervals)
    content = form(schedule, line, arguments.colors or ("worker" if plain else "action"))
    size = out.write_bytes(content if isinstance(content, bytes) else content.encode())
    large = f" ({memory_text(size, 'bytes')})" if size > _LARGE else ""
    return Report([f"wrote {out}{large}: {line.title}, {facts}{memory_text(peak, line.memory_unit)}"])


def _schedule(arguments: argparse.Namespace) -> tuple[Schedule, Costs]:
    """The schedule of the arguments, and the costs of its stages."""
    name, sizes = arguments.schedule, (arguments.workers, arguments.chunks, arguments.stages_per_worker)
    if shared.is_file(name):
        if any(size is not None for size in sizes):
            raise ValueError(f"the file {name} sets the numbers of workers, chunks and stages: leave these options out")
        schedule = shared.read_schedule(Path(name))
        costs = arguments.costs.placed(schedule.placement)
    else:
        missing = [option for option, size in zip(("--workers", "--chunks"), sizes, strict=False) if size is None]
        if missing:
            schedule_spec(name)  # an unknown name is reported first
            raise ValueError(f"{' and '.join(missing)} missing: give a number, such as {missing[0]} 4")
        schedule, costs = build_for_shares(
            name,
            workers=arguments.workers,
            chunks=arguments.chunks,
            stages_per_worker=arguments.stages_per_worker,
            costs=arguments.costs,
        )
    count = schedule.micro_batches
    checkpointed = {"never": 0, "except_last": count - 1, "always": count}[arguments.checkpoint]
    if checkpointed and schedule.inference:
        raise ValueError(
            f"--checkpoint is {arguments.checkpoint!r}, but {name} has no backwards to recompute: leave it out"
        )
    return with_recompute(schedule, checkpointed) if checkpointed else schedule, costs


def _csv(schedule: Schedule, line: Timeline, colors: Colors) -> str:
    return to_csv(schedule, form="compute_comms" if schedule.communicates else "compute_only")


Form = Callable[[Schedule, Timeline, "Colors"], str | bytes]

# Longer suffixes come first.
_FORMS: Final[Mapping[str, Form]] = MappingProxyType(
    {
        ".trace.json": lambda schedule, line, colors: trace_json(line),
        ".svg": lambda schedule, line, colors: svg(line, colors=colors, update=colors == "worker"),
        ".csv": _csv,
        ".json": lambda schedule, line, colors: to_json(schedule) + "\n",
    }
)


def _form(out: Path) -> Form:
    found = next((form for ending, form in _FORMS.items() if out.name.lower().endswith(ending)), None)
    if found is None:
        raise ValueError(f"--out is {str(out)!r}: the name must end in one of {', '.join(_FORMS)}")
    if not out.parent.is_dir():
        raise ValueError(f"--out is {str(out)!r}: the folder {str(out.parent)!r} does not exist; make it first")
    return found
