"""What do two processes ask of the system in a step? Waits of threads, and system calls, per step.

The two gloo processes of `p2p_overhead` with its tiny stages, with pipework and with torch.distributed.pipelining. A
thread waits when it gives its core away by itself, which the kernel counts. System calls are counted by `strace`, which
slows the processes down, so they are counted in steps of their own.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks import harness
from benchmarks.p2p_overhead.run import OURS, SCHEDULES, THEIRS, parts_of
from benchmarks.p2p_overhead.task import SIZES, Task
from benchmarks.two_processes import TwoProcesses, two_processes

SENDING = ("write", "writev", "sendto", "sendmsg")
RECEIVING = ("read", "readv", "recvfrom", "recvmsg")
WARM_UP = 30  # steps


def waits(pid: int) -> int:
    """How often the threads of a process have given their cores away so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        lines = (task / "status").read_text().splitlines()
        total += int(next(line for line in lines if line.startswith("voluntary_ctxt_switches")).split()[1])
    return total


def system_calls(processes: TwoProcesses, name: str, steps: int) -> dict[str, float]:
    """The system calls of both processes in a step, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, str(pid)) for pid in processes.pids]
        tracers = [
            subprocess.Popen(["strace", "-c", "-f", "-q", "-o", str(file), "-p", file.name], stderr=subprocess.DEVNULL)
            for file in files
        ]
        time.sleep(1.0)  # until they are attached
        processes.take(name, steps)
        for tracer in tracers:
            tracer.send_signal(signal.SIGINT)
            tracer.wait()
        counts: dict[str, float] = {}
        for line in (line for file in files for line in file.read_text().splitlines()):
            cells = line.split()
            if len(cells) >= 5 and cells[3].isdigit() and cells[-1] != "total":
                counts[cells[-1]] = counts.get(cells[-1], 0.0) + int(cells[3]) / steps
    return counts


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--steps", 200, 20, "of which the mean is taken")
    options.add_argument("--chunks", type=int, nargs="+", default=[8, 32], help="micro-batches (default 8 32)")
    arguments = options.parse_args(argv)
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed; on Debian: apt-get install strace")
    rows, runs = [], []
    with harness.on_this_machine() as machine:
        for chunks in arguments.chunks:
            with two_processes(partial(parts_of, Task(SIZES["tiny"], chunks))) as processes:
                for name in (f"{who} {schedule}" for schedule in SCHEDULES for who in (OURS, THEIRS)):
                    processes.take(name, WARM_UP)
                    before = sum(map(waits, processes.pids))
                    processes.take(name, arguments.steps)
                    waited = (sum(map(waits, processes.pids)) - before) / arguments.steps
                    calls = system_calls(processes, name, arguments.steps)
                    sums = [sum(calls.get(each, 0.0) for each in kind) for kind in (SENDING, RECEIVING, ("futex",))]
                    rows.append(
                        [name, str(chunks), f"{waited:.0f}", *(f"{each:.0f}" for each in (sum(calls.values()), *sums))]
                    )
                    runs.append({"name": name, "micro_batches": chunks, "waits": waited, "calls": calls})
    print("in a step, both processes together: waits of threads, system calls, and of these what sends, receives and")
    print("wakes or waits for a thread\n")
    harness.print_table(["", "micro-batches", "waits", "system calls", "sending", "receiving", "futex"], rows)
    harness.conclude("counts_between_processes", arguments, machine, [], {"unit": "of one step", "runs": runs})


if __name__ == "__main__":
    main()
