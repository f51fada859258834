"""What does the host need to launch a step: with a thread for each worker, and with one thread for all of them?

Accelerators compute while the host launches, so a step can be no shorter than its launches. Stages are a linear layer
and a ReLU, or blocks of four layers, on tensors so small that their kernels take next to no time. The plain model
launches the same layers on one device, micro-batch by micro-batch. With `Pipe(debug="one_thread")` one thread launches
the actions of all workers in the order of their simulated starts, so none waits for a message or for Python's lock.
Beside the seconds on the clock there are those that Python's threads computed: they do not depend on what else runs on
the machine, and lack the waits for the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework import Pipe

WIDTH, ROWS = 8, 2
PLAIN, THREADS, ONE = "plain", "a thread each", "one thread"
TARGET = 1.3  # of the plain model's launches
WARM_UP = 6  # the first mini-batches compare and inspect


@dataclass(frozen=True)
class Case:
    """A pipe to be measured.

    Attributes:
        stages: how many; each has a worker.
        blocks: of four layers in each stage; 0: a linear layer and a ReLU.
    """

    stages: int
    blocks: int

    def __str__(self) -> str:
        size = f"{self.blocks} block{'s' * (self.blocks > 1)}" if self.blocks else "a linear layer"
        return f"{self.stages} stages of {size}"

    def model(self) -> nn.Sequential:
        """The same parameters each time."""
        torch.manual_seed(0)
        return nn.Sequential(*(self._stage() for _ in range(self.stages)))

    def _stage(self) -> nn.Sequential:
        if not self.blocks:
            return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        layers = [
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
            for _ in range(self.blocks)
        ]
        return nn.Sequential(*layers)


@dataclass
class Times:
    """Seconds of each round: on the clock, and in which Python's threads computed."""

    clock: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """A few small operators."""
    return (output - target).square().mean()


def computed() -> float:
    """Seconds that Python's threads have computed; not those of a simulated device's streams."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threading.enumerate() if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def candidate(run: Callable[[], None], before: Callable[[], None], times: Times) -> harness.Candidate:
    """Launches a step, while the devices have nothing else to do."""

    def launch() -> float:
        before()
        if torch.accelerator.is_available():
            for device in range(torch.accelerator.device_count()):
                torch.accelerator.synchronize(device)
        start, start_computed = time.perf_counter(), computed()
        run()
        times.clock.append(time.perf_counter() - start)
        times.computed.append(computed() - start_computed)
        return times.clock[-1]

    return launch


def measure(case: Case, devices: Sequence[str], micro_batches: int, rounds: int) -> dict[str, Times]:
    """The plain model and both pipes take turns; all must compute the same gradients."""
    devices = [devices[stage % len(devices)] for stage in range(case.stages)]
    x = torch.linspace(-1, 1, micro_batches * ROWS * WIDTH).reshape(-1, WIDTH).to(devices[0])
    y, y_plain = (torch.ones(len(x), WIDTH, device=devices[end]) for end in (-1, 0))
    plain = case.model().to(devices[0])
    pairs = list(zip(x.split(ROWS), y_plain.split(ROWS), strict=True))

    def run_plain() -> None:
        with torch.autograd.set_multithreading_enabled(False):
            for piece, target in pairs:
                (loss_of(plain(piece), target) / micro_batches).backward()

    def pipe(one_thread: bool) -> Pipe:
        return Pipe(
            case.model(), micro_batches, "never", balance=[1] * case.stages, devices=devices, schedule="1f1b",
            loss_fn=loss_of, debug="one_thread" if one_thread else (),
        )  # fmt: skip

    threads, one = pipe(one_thread=False), pipe(one_thread=True)

    times = {name: Times() for name in (PLAIN, THREADS, ONE)}
    candidates = {
        PLAIN: candidate(run_plain, plain.zero_grad, times[PLAIN]),
        THREADS: candidate(lambda: threads(x, target=y).backward(), threads.zero_grad, times[THREADS]),
        ONE: candidate(lambda: one(x, target=y).backward(), one.zero_grad, times[ONE]),
    }
    harness.alternate(candidates, rounds, warm_up=WARM_UP)
    for each in (threads, one):
        harness.check_gradients(
            "a pipe", [grad.cpu() for grad in harness.gradients_of(each)],
            [grad.cpu() for grad in harness.gradients_of(plain)],
        )  # fmt: skip
    return {name: Times(each.clock[WARM_UP:], each.computed[WARM_UP:]) for name, each in times.items()}


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_amount("--rounds", 40, 5, "of each case")
    options.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="(default 2 4 8)")
    options.add_argument("--blocks", type=int, nargs="+", default=[0, 1, 4], help="in a stage (default 0 1 4)")
    options.add_argument("--micro-batches", type=int, default=32, help="(default 32)")
    options.add_argument(
        "--devices", nargs="+", default=["cpu"],
        help='of the stages, in turns, such as cuda:0 cuda:1; "sim:0 sim:1" are simulated, "sim" all (default cpu)',
    )  # fmt: skip
    arguments = options.parse_args(argv)
    devices = arguments.devices
    if any(device.startswith("sim") for device in devices):
        from tests.accelerator import simulated  # makes it PyTorch's accelerator, for the whole process

        simulated.configure(devices=simulated.MAX_DEVICES, races=0, poison=0, stacks=False)
        if devices == ["sim"]:
            devices = [f"sim:{index}" for index in range(simulated.MAX_DEVICES)]
    cases = [Case(stages, blocks) for blocks in arguments.blocks for stages in arguments.stages]
    with harness.on_this_machine() as machine:
        measured = {case: measure(case, devices, arguments.micro_batches, arguments.rounds) for case in cases}

    verdicts = report(measured, arguments.micro_batches)
    content = {
        "devices": devices,
        "micro_batches": arguments.micro_batches,
        "unit": "seconds of one mini-batch",
        "cases": {str(case): {name: vars(each) for name, each in times.items()} for case, times in measured.items()},
    }
    harness.conclude("host_launch", arguments, machine, verdicts, content)


def report(measured: dict[Case, dict[str, Times]], micro_batches: int) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    print(
        "microseconds per stage and micro-batch: on the clock, median / fastest; computed by Python's threads, median\n"
    )
    rows, verdicts = [], []
    for case, times in measured.items():
        actions = case.stages * micro_batches
        cells = [
            " / ".join(f"{1e6 * seconds / actions:.0f}" for seconds in (median(each.clock), min(each.clock)))
            + f"; {1e6 * median(each.computed) / actions:.0f}"
            for each in times.values()
        ]
        ratios = {name: harness.median_ratio(times[name].computed, times[PLAIN].computed) for name in (THREADS, ONE)}
        rows.append([str(case), *cells, *(f"{ratio:.2f}" for ratio in ratios.values())])
        verdicts.append(Verdict(f"{case}: {THREADS}, computed", ratios[THREADS], TARGET, "x the plain model"))
    harness.print_table(["", PLAIN, THREADS, ONE, f"{THREADS} / {PLAIN}", f"{ONE} / {PLAIN}"], rows)
    print("\nratios are of what was computed, medians of the rounds'\n")
    return verdicts


if __name__ == "__main__":
    main()
