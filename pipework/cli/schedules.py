"""`python -m pipework draw`, `compare` and `check`: pictures and files of a schedule, and what simulations say."""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pipework.schedule
from pipework.cli.arguments import FILES, Report, add_command, add_options, read_schedule
from pipework.schedule import Costs, Schedule, Timeline, build, grid, simulate, svg, to_csv, to_json, validate
from pipework.schedule.draw.units import memory_text, time_text
from pipework.schedule.passes.communication import with_communication
from pipework.timeline import trace_json

if TYPE_CHECKING:
    from pipework.cli.arguments import Commands

_ENDINGS = (".trace.json", ".svg", ".csv", ".json")


def add_to(commands: Commands) -> None:
    """Add the commands to a parser."""
    of_shares = "Times and memory are those of a worker's whole share of the model, for any number of stages."
    text = "draw the predicted timeline of a schedule as text, or with --out as a picture or a file for other programs"
    more = f"{of_shares} Example: python -m pipework draw zb-v --workers 4 --chunks 8 --costs F=1,B=2 --out zb.svg"
    parser = add_command(commands, "draw", draw, text, more)
    parser.add_argument("schedule", help=f"one of {', '.join(pipework.schedule.SCHEDULES)}; or a file ({FILES})")
    add_options(parser, "--workers", "--chunks", "--stages-per-worker", "--costs")
    add_options(parser, "--channel", default=None)
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        help="write a picture (.svg), the schedule (.csv in PyTorch's form, with --channel also its transfers; "
        ".json), or a trace for https://ui.perfetto.dev (.trace.json)",
    )  # fmt: skip

    text = "simulate all schedules with the same costs and memory, and list those that fit, the fastest first"
    more = f"{of_shares} Example: python -m pipework compare --workers 8 --chunks 32 --memory 5 --costs F=1,B=2,c=0.05"
    parser = add_command(commands, "compare", compare, text, more)
    add_options(parser, "--workers", "--chunks", required=True)
    add_options(parser, "--memory", "--costs", "--stages-per-worker", "--channel")

    text = "check whether the schedule in a file can be executed, and print the reasons if not"
    more = "The exit status is 0 if it can, 1 if not, and 2 if the file holds no schedule."
    parser = add_command(commands, "check", check, text, more)
    parser.add_argument("file", type=Path, help=f"a schedule ({FILES}); CSV in any form of PyTorch")
    add_options(parser, "--channel", "--memory", "--costs")


def draw(arguments: argparse.Namespace) -> Report:
    """Draw a schedule, or write it.

    Raises:
        ValueError: an argument is out of range, or the file holds no schedule.
        OSError: a file cannot be read or written.
    """
    out: Path | None = arguments.out
    if out is not None and not out.name.lower().endswith(_ENDINGS):
        raise ValueError(f"--out is {str(out)!r}: the name must end in one of {', '.join(_ENDINGS)}")
    schedule, costs = _schedule(arguments)
    if arguments.channel is not None and not schedule.communicates:
        schedule = with_communication(schedule, costs, channel=arguments.channel)
    simulation = simulate(schedule, costs, channel=arguments.channel or "unbounded")
    line, peak = simulation.timeline, max(simulation.peak_memory)
    facts = f"bubble {line.bubble:.1%}, makespan {time_text(line.makespan, line.unit)}, peak memory "
    if out is None:
        # If the output is no terminal, its width is not limited.
        text = grid(line, max_width=max(40, shutil.get_terminal_size(fallback=(160, 24)).columns))
        share = "worker" if schedule.stages > schedule.workers else "stage"
        facts += f"{memory_text(peak, '')} (in micro-batches of activations of a {share})"
        return Report([line.title, text, facts])
    line = replace(line, memory_unit="micro-batches")
    out.write_text(_content(out.name.lower(), schedule, line), encoding="utf-8")
    return Report([f"wrote {out}: {line.title}, {facts}{memory_text(peak, line.memory_unit)}"])


def _schedule(arguments: argparse.Namespace) -> tuple[Schedule, Costs]:
    """The schedule of the arguments, and the costs of its stages."""
    name, file = arguments.schedule, Path(arguments.schedule)
    sizes = {"workers": arguments.workers, "chunks": arguments.chunks, "stages_per_worker": arguments.stages_per_worker}
    if file.suffix.lower() in FILES.split(", "):
        if any(size is not None for size in sizes.values()):
            raise ValueError(f"the file {name} sets the numbers of workers, chunks and stages: leave these options out")
        schedule = read_schedule(file)
        return schedule, arguments.costs.placed(schedule.placement)
    pipework.schedule.schedule_spec(name)  # an unknown name is reported first
    if arguments.workers is None or arguments.chunks is None:
        raise ValueError("--workers or --chunks is missing: give numbers, such as --workers 4 --chunks 8")
    schedule = build(name, **sizes, costs=arguments.costs.placed)
    return schedule, arguments.costs.placed(schedule.placement)


def _content(name: str, schedule: Schedule, line: Timeline) -> str:
    """The content of a file, by the ending of its name."""
    if name.endswith(".trace.json"):
        return trace_json(line)
    if name.endswith(".json"):
        return to_json(schedule) + "\n"
    if name.endswith(".csv"):
        return to_csv(schedule)
    # The colours of workers would hide split backwards and the stages of a worker.
    plain = schedule.stages == schedule.workers and not schedule.split_stages
    return svg(line, colors="worker" if plain else "action", update=plain)


def compare(arguments: argparse.Namespace) -> Report:
    """Compare all schedules.

    Raises:
        ValueError: an argument is out of range.
    """
    names = ("workers", "chunks", "costs", "stages_per_worker", "channel")
    options = {name: getattr(arguments, name) for name in names}
    return Report([str(pipework.schedule.compare(**options, memory_limit=arguments.memory))])


def check(arguments: argparse.Namespace) -> Report:
    """Tell whether a schedule can be executed.

    Raises:
        ValueError: the file holds no schedule, or an argument is out of range.
        OSError: the file cannot be read.
    """
    schedule = read_schedule(arguments.file)
    costs = arguments.costs.placed(schedule.placement)
    options = {"channel": arguments.channel, "memory_limit": arguments.memory}
    found = validate(schedule, costs, **options)
    if not found.ok:
        reasons = [f"  {each.message}" for each in found.violations]
        return Report([f"{arguments.file}: cannot be executed ({schedule.title})", *reasons], status=1)
    result = simulate(schedule, costs, **options)
    peak = memory_text(max(result.peak_memory), "")
    lines = [f"{arguments.file}: can be executed ({schedule.title})"]
    if not found.ascending:
        lines.append("  but a Pipe refuses it: gradients are not formed in the order of micro-batches, as in a loop")
    lines.append(f"  bubble {result.bubble:.1%}, makespan {time_text(result.makespan, '')}, peak memory {peak}")
    if arguments.costs == Costs():
        lines.append("  for the default costs; give those of your model with --costs")
    return Report(lines)
