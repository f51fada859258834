"""The same question as in run.py, answered with the processor's instructions instead of time. Linux, with `perf`.

Times of a machine that others use, too, differ by a factor of two from minute to minute; the number of instructions
does not. A process runs some steps, another one more of them; the difference is what those cost, without starting up.
"""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys

import torch

from benchmarks import harness
from benchmarks.overhead.run import Case, cases, piped, plain_loop
from benchmarks.schedules import TRAINING

FEW = 20  # steps, in which everything that happens once has happened


def run(case: Case, what: str, micro_batches: int, steps: int) -> None:
    """Runs steps in a child process."""
    torch.set_num_threads(1)
    batch, target = torch.randn(micro_batches), torch.randn(micro_batches)
    module = case.model() if what == "plain" else case.pipe(micro_batches)
    step = (plain_loop if what == "plain" else piped)(case, module, batch, target)  # type: ignore[operator]
    gc.disable()
    for _ in range(steps):
        module.zero_grad()
        step()


def counted(case: Case, what: str, micro_batches: int, steps: int) -> float:
    """Instructions of a step."""
    totals = []
    for count in (FEW, FEW + steps):
        child = json.dumps([vars(case), what, micro_batches, count])
        command = ["perf", "stat", "-x,", "-e", "instructions:u", sys.executable, "-m", __spec__.name, "--child", child]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        totals.append(int(next(line for line in output.splitlines() if "instructions" in line).split(",")[0]))
    return (totals[1] - totals[0]) / steps


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--schedules", nargs="+", default=TRAINING, help="(default all that train)")
    options.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="(default 1 2)")
    options.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4, 8], help="of one worker (default 1 2 4 8)")
    options.add_argument("--chunks", type=int, nargs="+", default=[8, 64], help="(default 8 64)")
    arguments = options.parse_args(argv)
    if shutil.which("perf") is None:
        raise SystemExit("perf is not installed; on Debian: apt-get install linux-perf")
    rows, runs = [], []
    with harness.on_this_machine() as machine:
        for case in cases(arguments.schedules, arguments.workers, arguments.stages):
            label = [case.name, str(case.workers), str(case.stages_per_worker)]
            excess = {}
            each: list[str] = []
            for micro_batches in arguments.chunks:
                pieces = case.stages * micro_batches
                steps = max(5, (2_000 if arguments.quick else 20_000) // pieces)
                plain, pipe = (counted(case, what, micro_batches, steps) for what in ("plain", "pipe"))
                excess[micro_batches] = pipe - plain
                runs.append({**vars(case), "micro_batches": micro_batches, "plain": plain, "pipe": pipe})
                share = (pipe - plain) / plain
                each += [f"{plain / pieces / 1e3:.1f}", f"{(pipe - plain) / pieces / 1e3:.1f}", f"{share:.0%}"]
            fixed, slope = harness.line_fit(list(excess), list(excess.values())) if len(excess) > 1 else (0.0, 0.0)
            rows.append([*label, *each, f"{fixed / 1e3:.0f}", f"{slope / case.stages / 1e3:.1f}"])
    print("thousands of instructions per stage and micro-batch, forward and backward: of the plain loop, and how many")
    print("more the pipe needs; then its excess as once a step + each stage and micro-batch\n")
    columns = [
        column
        for count in arguments.chunks
        for column in (f"plain, m = {count}", f"pipe above it, m = {count}", f"share, m = {count}")
    ]
    harness.print_table(["schedule", "workers", "stages per worker", *columns, "once a step", "each"], rows)
    harness.conclude(
        "overhead_instructions", arguments, machine, [], {"unit": "instructions of one mini-batch", "runs": runs}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        values, *others = json.loads(sys.argv[2])
        run(Case(**values), *others)
    else:
        main()
