"""The parts that all benchmarks share: options, turns, medians, a note on the machine, tables, results as JSON.

Only the standard library and torch.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

RESULTS = Path(__file__).resolve().parent / "results"

Candidate = Callable[[], float]
"""Runs once and returns the seconds that it took. It does by itself what is not timed, such as clearing gradients."""


class Options(argparse.ArgumentParser):
    """The options of a benchmark: `--quick`, `--save` and its own.

    Args:
        description: the docstring of the benchmark.
    """

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._amounts: dict[str, tuple[Any, Any]] = {}
        self.add_argument("--quick", action="store_true", help="fewer repetitions: a first impression, not a result")
        self.add_argument("--save", action="store_true", help="write the numbers to benchmarks/results/DATE-NAME.json")

    def add_amount(self, flag: str, usual: float, quick: float, what: str) -> None:
        """Adds an option for how much is measured. Its default is smaller with `--quick`."""
        self._amounts[flag.removeprefix("--")] = usual, quick
        self.add_argument(flag, type=type(usual), help=f"{what} (default {usual:g}; with --quick {quick:g})")

    def parse_args(self, argv: Sequence[str] | None = None) -> argparse.Namespace:  # type: ignore[override]
        """The options, with their defaults."""
        arguments = super().parse_args(argv)
        for name, (usual, quick) in self._amounts.items():
            if getattr(arguments, name) is None:
                setattr(arguments, name, quick if arguments.quick else usual)
        return arguments


def timed(run: Callable[[], object], before: Callable[[], object] | None = None) -> Candidate:
    """A candidate that times `run`, after `before`, which is not timed."""

    def candidate() -> float:
        if before is not None:
            before()
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    return candidate


def alternate(candidates: Mapping[str, Candidate], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Runs the candidates in turns, so that a disturbance of the machine meets all of them.

    Each round begins with another candidate. The cyclic garbage collector is off meanwhile, as in `timeit`.

    Returns:
        The seconds of each candidate, one number a round, in the order of the rounds.
    """
    names = list(candidates)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(warm_up):
        for name in names:
            candidates[name]()
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                seconds[name].append(candidates[name]())
    finally:
        if enabled:
            gc.enable()
    return seconds


def rounds_within(seconds: float, candidates: Mapping[str, Candidate], least: int, most: int) -> int:
    """How many rounds of the candidates fit into a time, as three rounds of them show."""
    once = sum(sum(times) for times in alternate(candidates, rounds=3).values()) / 3
    return min(most, max(least, int(seconds / once)))


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the rounds' ratios: steadier than a ratio of medians when the machine's speed drifts."""
    return median(top / bottom for top, bottom in zip(numerator, denominator, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The values between which the middle half lies."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]


def middle_half(values: Sequence[float], digits: int = 3) -> str:
    """The quartiles as text."""
    low, high = quartiles(values)
    return f"{low:.{digits}f} to {high:.{digits}f}"


def factor(a: float, b: float) -> float:
    """The ratio of two numbers, the larger one to the smaller one."""
    return max(a / b, b / a)


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients that the last step left."""
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def check_gradients(
    name: str, got: Sequence[Tensor], wanted: Sequence[Tensor], *, of_largest: float = 0.0, atol: float = 1e-6
) -> None:
    """Raises an AssertionError unless a candidate computes the same gradients, up to the rounding of another order.

    Args:
        name: of the candidate.
        got: its gradients.
        wanted: those of another candidate.
        of_largest: the tolerance as a share of each tensor's largest element, in addition to `atol`.
        atol: the absolute tolerance.
    """
    assert len(got) == len(wanted), f"other gradients: {name}"
    for one, other in zip(got, wanted, strict=True):
        tolerance = of_largest * float(other.abs().max()) + atol
        assert torch.allclose(one, other, rtol=1e-3, atol=tolerance), f"other gradients: {name}"


def old_library(name: str, version: str, module: str | None = None) -> ModuleType | None:
    """A module of an old library; None, and a line of text, where that is not installed.

    Args:
        name: of the library.
        version: that the benchmark is written for.
        module: its name, if it is not the library's.
    """
    try:
        return importlib.import_module(module or name)
    except ImportError:
        print(f"{name} is not installed and left out: pip install --no-deps {name}=={version}\n")
        return None


def line_fit(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    slope = covariance / sum((a - mean_x) ** 2 for a in x)
    return mean_y - slope * mean_x, slope


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table in Markdown, the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def show(cells: Sequence[str]) -> None:
        others = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        print("| " + " | ".join([cells[0].ljust(widths[0]), *others]) + " |")

    show(header)
    show(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for row in rows:
        show(row)


@dataclass(frozen=True)
class Verdict:
    """A measured value beside its target; smaller is better."""

    what: str
    measured: float
    target: float
    unit: str

    @property
    def reached(self) -> bool:
        """Whether the measured value is as small as wanted."""
        return self.measured <= self.target

    def __str__(self) -> str:
        word = "REACHED" if self.reached else "MISSED"
        unit = self.unit if self.unit == "%" else f" {self.unit}"
        return f"{word}: {self.what}: {self.measured:.3g}{unit}, to reach at most {self.target:.3g}{unit}"


@dataclass
class Machine:
    """The machine that the numbers come from, and how busy it was.

    Attributes:
        cpu: its model.
        cores: how many this process may use.
        load_before: the 1-minute load average when the benchmark started, without the benchmark itself.
        load_after: the same at the end, with the benchmark itself.
        others: the share of all cores that other processes and the hypervisor took meanwhile; None: not known.
    """

    cpu: str = field(default_factory=lambda: _cpu_model())
    cores: int = field(default_factory=lambda: _cores())
    torch: str = torch.__version__
    python: str = platform.python_version()
    system: str = field(default_factory=lambda: f"{platform.system()} {platform.release()}")
    load_before: float = field(default_factory=lambda: _load())
    load_after: float = 0.0
    others: float | None = None

    def __str__(self) -> str:
        others = "" if self.others is None else f", others took {self.others:.1%} of the cores"
        return (
            f"{self.cpu}, {self.cores} cores, torch {self.torch}, Python {self.python}; "
            f"load average {self.load_before:.2f} before and {self.load_after:.2f} after{others}"
        )


@contextmanager
def on_this_machine(threads: int = 1) -> Iterator[Machine]:
    """Fixes the number of intra-op threads, and notes how busy the machine is.

    Processes that are started inside must have ended when the context is left.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    machine = Machine()
    start, own, total = time.perf_counter(), _own_seconds(), _busy_seconds()
    try:
        yield machine
    finally:
        torch.set_num_threads(before)
        machine.load_after = _load()
        total_after = _busy_seconds()
        if total is not None and total_after is not None:
            foreign = (total_after - total) - (_own_seconds() - own)
            machine.others = max(0.0, foreign) / ((time.perf_counter() - start) * (os.cpu_count() or 1))


def save(name: str, machine: Machine, verdicts: Sequence[Verdict], results: Mapping[str, Any]) -> Path:
    """Writes what was measured to `benchmarks/results/DATE-NAME.json`."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{date.today().isoformat()}-{name}.json"
    content = {
        "benchmark": name,
        "date": date.today().isoformat(),
        "machine": vars(machine),
        "verdicts": [{**vars(verdict), "reached": verdict.reached} for verdict in verdicts],
        **results,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return path


def conclude(
    name: str,
    arguments: argparse.Namespace,
    machine: Machine,
    verdicts: Sequence[Verdict],
    results: Mapping[str, Any],
) -> None:
    """Prints the machine and the verdicts, and saves everything if asked to."""
    print(f"\n{machine}")
    for verdict in verdicts:
        print(verdict)
    if arguments.save:
        print(f"saved as {save(name, machine, verdicts, results)}")


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> float:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def _own_seconds() -> float:
    """The processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_seconds() -> float | None:
    """The processor time of all processes, and what the hypervisor kept; None where there is no /proc/stat."""
    try:
        fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
