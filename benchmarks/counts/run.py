"""What does the runtime do for each action? Counted, so that the answer is the same in every run.

The steps of `overhead`: stages that multiply one number by one parameter, and a plain loop over the un-partitioned
model beside them. In all threads, the calls of Python functions and of functions in C are counted, and the instructions
that the interpreter executes. What a step with 64 micro-batches has more than one with 32 is divided by stages and
micro-batches; what is left is done once a step. A thread that waits for another one gives its core away, which the
kernel counts; that depends on what else runs.
"""

from __future__ import annotations

import resource
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from types import FrameType
from typing import Any

import torch

from benchmarks import harness
from benchmarks.harness import Verdict
from benchmarks.overhead.run import Case, cases, piped, plain_loop
from benchmarks.schedules import TRAINING
from pipework import PipeWarning

FEW, MANY = 32, 64  # micro-batches
WARM_UP = 20  # the first mini-batches compare and inspect
KINDS = ("python", "c", "instructions")
TARGETS = {1: 40.0, 2: 55.0}  # workers: calls of Python functions and of C for each stage and micro-batch

Counts = dict[str, float]


class Tracer:
    """Counts what Python does in this thread and in those that start while it is installed.

    Attributes:
        counts: by kind.
        names: calls by the name of what is called, and from where.
    """

    def __init__(self) -> None:
        self._on = False
        self.counts: Counts = dict.fromkeys(KINDS, 0)
        self.names: Counter[str] = Counter()

    def calls(self, made: Callable[[], Callable[[], object]]) -> None:
        """Counts the calls of what is made."""
        self._count(made, threading.setprofile, sys.setprofile, self._profile)

    def instructions(self, made: Callable[[], Callable[[], object]]) -> None:
        """Counts the instructions of what is made."""
        self._count(made, threading.settrace, sys.settrace, self._trace)

    def _count(
        self,
        made: Callable[[], Callable[[], object]],
        in_threads: Callable[[Any], object],
        here: Callable[[Any], object],
        function: Callable[..., Any],
    ) -> None:
        in_threads(function)
        try:
            run = made()
            for _ in range(WARM_UP):
                run()
        finally:
            in_threads(None)
        here(function)
        self._on = True
        try:
            run()
        finally:
            self._on = False
            here(None)

    def _profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self._on:
            return
        if event == "call":
            self.counts["python"] += 1
            self.names[f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_name}"] += 1
        elif event == "c_call":
            self.counts["c"] += 1
            self.names[f"C: {getattr(argument, '__qualname__', argument)}, in {frame.f_code.co_name}"] += 1

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "opcode":
            self.counts["instructions"] += self._on
        elif not self._on:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._trace


def step(case: Case, micro_batches: int, name: str) -> Callable[[], object]:
    """A step of the pipe or of the plain loop."""
    batch, target = torch.randn(micro_batches), torch.randn(micro_batches)
    if name == "plain":
        return plain_loop(case, case.model(), batch, target)
    return piped(case, case.pipe(micro_batches), batch, target)


def count(case: Case, micro_batches: int, name: str) -> Tracer:
    """What one step does."""
    tracer = Tracer()
    tracer.calls(lambda: step(case, micro_batches, name))
    tracer.instructions(lambda: step(case, micro_batches, name))
    return tracer


def waits(case: Case, rounds: int) -> float:
    """How often threads give their cores away in a step."""
    run = step(case, MANY, "pipe")
    found = []
    for _ in range(WARM_UP + rounds):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        run()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before)
    return median(found[WARM_UP:])


def both_ways(found: Sequence[Case]) -> list[Case]:
    """Of several workers, with a thread for each and with one for all: a pipe itself chooses what is faster."""
    ways = [
        [case] if case.workers == 1 else [replace(case, one_thread=each) for each in (False, True)] for case in found
    ]
    return [case for way in ways for case in way]


def per_action(case: Case, name: str) -> tuple[Counts, Counts, Counter[str]]:
    """For each stage and micro-batch, and once a step; and the calls for each stage and micro-batch by name."""
    few, many = (count(case, micro_batches, name) for micro_batches in (FEW, MANY))
    size = case.stages * (MANY - FEW)
    each = {kind: (many.counts[kind] - few.counts[kind]) / size for kind in KINDS}
    once = {kind: many.counts[kind] - each[kind] * case.stages * MANY for kind in KINDS}
    names = Counter({key: (many.names[key] - few.names[key]) / size for key in many.names})
    return each, once, names


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 50, 3, "steps in which waits are counted")
    options.add_argument("--schedules", nargs="+", default=TRAINING, help="(default all that train)")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    options.add_argument("--stages", type=int, nargs="+", default=[1, 2], help="of one worker (default 1 2)")
    options.add_argument("--names", type=int, default=0, help="print so many functions that are called most")
    arguments = options.parse_args(argv)
    warnings.simplefilter("ignore", PipeWarning)  # the loss is a sum, and no mean over rows
    results, rows, verdicts = [], [], []
    with harness.on_this_machine() as machine:
        for case in both_ways(cases(arguments.schedules, arguments.workers, arguments.stages)):
            each, once, names = per_action(case, "pipe")
            plain, _, _ = per_action(case, "plain")
            waited = waits(case, arguments.rounds)
            label = [case.name, str(case.workers), str(case.stages_per_worker)]
            rows.append([*label, *cells(each), *cells(plain), *cells(once), f"{waited:g}"])
            results.append({**vars(case), "each": each, "plain": plain, "once": once, "waits": waited})
            title = f"{case.name}, workers: {case.workers}, stages per worker: {case.stages_per_worker}"
            if case.workers in TARGETS:
                verdicts.append(Verdict(f"{title}, calls", each["python"] + each["c"], TARGETS[case.workers], "calls"))
            if arguments.names:
                print(f"\n{title}: calls for each stage and micro-batch\n")
                harness.print_table(
                    ["calls", "of"], [[f"{n:.2f}", key] for key, n in names.most_common(arguments.names)]
                )
                print()
    print("calls of Python functions, of functions in C, and instructions of the interpreter: for each stage and")
    print(f"micro-batch, in the pipe and in the plain loop; once a step; and threads' waits in a step of {MANY}\n")
    columns = ["schedule", "workers", "stages per worker"]
    columns += [f"{where}{kind}" for where in ("", "plain ", "once ") for kind in ("Python", "C", "instr.")]
    harness.print_table([*columns, "waits"], rows)
    harness.conclude("counts", arguments, machine, verdicts, {"cases": results})


def cells(counts: Counts) -> Sequence[str]:
    """For a table."""
    return [f"{counts[kind]:.1f}".removesuffix(".0") for kind in KINDS]


if __name__ == "__main__":
    main()
