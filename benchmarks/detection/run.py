"""How soon do all ranks know that one of them has failed?

Three ranks train, and a fault strikes the second one in the middle of a step. What is measured is the time from there
until the last of the others has raised its error. Ranks are forked from a process that has imported everything.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import TCPStore

import pipework
from benchmarks import harness
from benchmarks.harness import Verdict
from pipework import Pipe, PipelineError
from tests import injection as faults

RANKS = 3
LIMIT = 60.0  # seconds after which something is wrong


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        fault: on which rank and where, in the text form of `tests.injection`; empty: the store ends.
        bound: within which all others are to raise an error, in seconds.
        says: the kind of their error; on a machine that is far too busy, one may come before the other.
        settings: of `pipework.init`.
    """

    fault: str
    bound: float
    says: str
    settings: dict[str, float]

    @property
    def rank(self) -> int | None:
        """Who fails."""
        return faults.Fault.parse(self.fault).rank if self.fault else None


def kinds(detect: float) -> dict[str, Kind]:
    """All of them.

    Args:
        detect: seconds of silence after which a rank is lost.
    """
    place = "rank=1,step=3,micro_batch=1"
    usual, short = {"detect": 10.0}, {"detect": detect}
    return {
        "killed in a forward": Kind(f"{place},action=F,kind=kill", 2, "lost", usual),
        "killed in a backward": Kind(f"{place},action=B,kind=kill", 2, "lost", usual),
        "killed between two steps": Kind("rank=1,step=3,action=optimizer,kind=kill", 2, "lost", usual),
        "an exception": Kind(f"{place},action=F,kind=raise", 2, "error", usual),
        "stopped (SIGSTOP)": Kind(f"{place},action=B,kind=stop", detect + 1, "lost", short),
        "keeps the GIL": Kind(f"{place},action=F,kind=hold_gil,seconds=60", detect + 1, "lost", short),
        "an endless loop": Kind(
            f"{place},action=F,kind=hang", detect + 1, "stuck or lost", {"detect": detect, "action_timeout": detect}
        ),
        "the store ends": Kind("", detect + 1, "lost", short),
    }


def measure(kind: Kind) -> float:
    """Seconds from the fault until the last of the others has raised."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = fork(lambda: serve(folder))
        wait_for([folder / "port"])
        port = int((folder / "port").read_text())
        ranks = [fork(lambda rank=rank: train(rank, port, kind, folder)) for rank in range(RANKS)]  # type: ignore[misc]
        others = [rank for rank in range(RANKS) if rank != kind.rank]
        try:
            if not kind.fault:
                wait_for([folder / f"{rank}.step" for rank in range(RANKS)])
                write(folder / "struck", str(time.time()))
                os.kill(store, signal.SIGKILL)
            wait_for([folder / f"{rank}.raised" for rank in others])
            raised = [(folder / f"{rank}.raised").read_text().split() for rank in others]
            struck = float((folder / "struck").read_text())
        finally:
            for pid in (store, *ranks):
                os.kill(pid, signal.SIGKILL)
            for pid in (store, *ranks):
                os.waitpid(pid, 0)
    for _, says, rank in raised:
        if says not in kind.says.split(" or ") or rank != str(kind.rank):
            raise RuntimeError(f"{kind.fault}: wanted {kind.says} of rank {kind.rank}, got {says} of rank {rank}")
    return max(float(when) for when, _, _ in raised) - struck


def fork(body: Any) -> int:
    """Runs a function in another process, which stays there until it is killed."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        log = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(log, stream)
        body()
        while True:
            time.sleep(60)
    finally:
        os._exit(1)


def serve(folder: Path) -> NoReturn:
    """The store, in a process of its own as that of torchrun."""
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    write(folder / "port", str(store.port))
    while store is not None:
        time.sleep(60)
    raise AssertionError("only a signal ends this")


def train(rank: int, port: int, kind: Kind, folder: Path) -> None:
    """What a rank does until there is an error."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ.update(PIPEWORK_FAULT=kind.fault, OMP_NUM_THREADS="1")
    strike = faults.Fault.strike

    def noted(fault: faults.Fault) -> None:
        write(folder / "struck", str(time.time()))
        strike(fault)

    faults.Fault.strike = noted  # type: ignore[method-assign]
    faults.install()
    layers = [layer for _ in range(RANKS) for layer in (nn.Linear(16, 16), nn.Tanh())]
    try:
        mesh = pipework.init(**kind.settings)  # type: ignore[arg-type]
        pipe = Pipe(nn.Sequential(*layers), chunks=4, schedule="1f1b", loss_fn=nn.functional.mse_loss, mesh=mesh)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        x = torch.randn(16, 16)
        step = 0
        while True:
            pipe(x, target=x).backward()
            optimizer.step()
            step += 1
            if step == 4:
                write(folder / f"{rank}.step", "4")
    except PipelineError as error:
        write(folder / f"{rank}.raised", f"{time.time()} {error.kind} {error.rank}")


def write(path: Path, text: str) -> None:
    """As a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def wait_for(paths: list[Path]) -> None:
    """Until all files are there."""
    deadline = time.monotonic() + LIMIT
    while missing := [path.name for path in paths if not path.exists()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{', '.join(missing)} did not come within {LIMIT:.0f} s")
        time.sleep(0.005)


def percentile(values: list[float], percent: int) -> float:
    """The value that so many percent do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 20, 3, "how often each fault strikes")
    options.add_argument("--detect", type=float, default=3.0, help="seconds of silence (default 3)")
    options.add_argument("--kinds", nargs="+", help="parts of the names of those that are wanted")
    arguments = options.parse_args(argv)
    rounds = arguments.rounds
    torch.optim.SGD([torch.zeros(1)])  # imports much, here rather than in each rank
    wanted = {
        name: kind
        for name, kind in kinds(arguments.detect).items()
        if arguments.kinds is None or any(part in name for part in arguments.kinds)
    }
    seconds: dict[str, list[float]] = {name: [] for name in wanted}
    with harness.on_this_machine() as machine:
        for number in range(rounds):
            for name, kind in wanted.items():
                seconds[name].append(measure(kind))
                print(f"round {number + 1} of {rounds}: {name}: {seconds[name][-1]:.2f} s", file=sys.stderr, flush=True)
    rows = [
        [name, f"{median(each):.2f}", f"{percentile(each, 99):.2f}", f"{wanted[name].bound:.0f}"]
        for name, each in seconds.items()
    ]
    harness.print_table(["a rank is, or the fault is", "p50 (s)", "p99 (s)", "at most (s)"], rows)
    verdicts = [
        Verdict(f"{name}, p99", percentile(each, 99), wanted[name].bound, "s") for name, each in seconds.items()
    ]
    size = {"ranks": RANKS, "detect": arguments.detect, "rounds": rounds}
    harness.conclude("detection", arguments, machine, verdicts, {"unit": "s", **size, "seconds": seconds})


if __name__ == "__main__":
    main()
