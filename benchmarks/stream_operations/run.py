"""How many operations on streams does a step ask the device for, and how many of them does it need?

Each stage is a linear layer and a ReLU, on the simulated accelerator of the tests, which counts. Steps with two numbers
of micro-batches give the operations for each further micro-batch, and what is left over is asked once in a step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework import Pipe
from pipework.runtime.stage.recomputation import MINI_BATCHES
from tests.accelerator import simulated

# In this order everywhere; the simulated device's names.
OPERATIONS = ("events_made", "events_recorded", "stream_waits", "record_streams")
CHUNKS = (8, 16)
STEPS = 10  # that are counted
WIDTH = 4


@dataclass(frozen=True)
class Operations:
    """How often each operation is asked for."""

    events_made: float
    events_recorded: float
    stream_waits: float
    record_streams: float

    def __str__(self) -> str:
        return " / ".join(f"{getattr(self, name):g}" for name in OPERATIONS)

    @property
    def total(self) -> float:
        """All of them."""
        return sum(getattr(self, name) for name in OPERATIONS)


@dataclass(frozen=True)
class Case:
    """A pipe whose operations are counted.

    Attributes:
        stages: how many; each has a worker.
        crossing: whether each has a device of its own; else they share one.
        schedule: its name.
        inside: where the loss is computed.
    """

    stages: int
    crossing: bool
    schedule: str
    inside: bool

    def __str__(self) -> str:
        devices = f"{self.stages} devices" if self.crossing else "one device"
        return f"{self.stages} stages, {devices}, {self.schedule}, loss {'inside' if self.inside else 'outside'}"

    @property
    def needed_each(self) -> Operations:
        """For each micro-batch.

        A value goes from each stage to the next one, and its gradient back. The reader's stream waits for an event of
        the writer's, and the reader is recorded on the memory. Between two devices the copy has a stream in between,
        with an event, a wait and a record of its own. Streams are recorded, too, on what passes between caller and
        workers: the input, the target or the output's gradient, and what the last stage returns.
        """
        messages = 2 * (self.stages - 1) * (2 if self.crossing else 1)
        return Operations(0, messages, messages, messages + 3)

    @property
    def needed_once(self) -> Operations:
        """In each step.

        In each run the streams of the workers wait for the caller's, and afterwards its for theirs and for those of the
        copies. There are two runs if the loss is outside. The caller's stream is recorded on the gradients of the
        parameters. If the loss is inside, an event marks when its gradient is known.
        """
        runs = 1 if self.inside else 2
        waits = 2 * self.stages * runs + (2 * (self.stages - 1) if self.crossing else 0)
        events = waits + (1 if self.inside else 0)
        return Operations(events, events, waits, 2 * self.stages)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The loss."""
    return (output - target).square().mean()


def cases(stages: list[int]) -> Iterator[Case]:
    """With the loss outside, all forwards come first, as in GPipe."""
    for crossing, number in itertools.product((True, False), stages):
        for schedule in ("gpipe", "1f1b", "zb-h1"):
            yield Case(number, crossing, schedule, inside=True)
        yield Case(number, crossing, "gpipe", inside=False)


def counts(case: Case, micro_batches: int) -> Operations:
    """Those of a step that is not one of the first, in which more is made and compared."""
    simulated.configure(devices=simulated.MAX_DEVICES)
    devices = [f"sim:{stage if case.crossing else 0}" for stage in range(case.stages)]
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in devices))
    pipe = Pipe(
        layers, micro_batches, "never", balance=[1] * case.stages, devices=devices, schedule=case.schedule,
        loss_fn=squares,
    )  # fmt: skip
    x = torch.ones(micro_batches, WIDTH, device=devices[0])
    y = torch.ones(micro_batches, WIDTH, device=devices[-1])
    found = []
    for step in range(MINI_BATCHES + STEPS):
        simulated.synchronize_all()
        simulated.reset_counts()
        loss = pipe(x, target=y) if case.inside else squares(pipe(x), y)
        loss.backward()
        if step >= MINI_BATCHES:
            found.append(simulated.counts())
        pipe.zero_grad()
    assert simulated.races() == []
    # A pool makes another event if more messages are on their way than ever before.
    return Operations(*(min(each.get(name, 0) for each in found) for name in OPERATIONS))


def measure(case: Case) -> tuple[Operations, Operations]:
    """The operations for each micro-batch, and those once in a step."""
    few, many = (counts(case, micro_batches) for micro_batches in CHUNKS)
    each = {name: (getattr(many, name) - getattr(few, name)) / (CHUNKS[1] - CHUNKS[0]) for name in OPERATIONS}
    once = {name: getattr(few, name) - CHUNKS[0] * each[name] for name in OPERATIONS}
    return Operations(**each), Operations(**once)


def main(argv: list[str] | None = None) -> None:
    options = harness.Options(__doc__)
    options.add_argument("--stages", type=int, nargs="+", default=[2, 4, 8], help="(default 2 4 8)")
    arguments = options.parse_args(argv)
    with harness.on_this_machine() as machine:
        measured = {case: measure(case) for case in cases(arguments.stages)}

    rows, verdicts, content = [], [], {}
    for case, (each, once) in measured.items():
        rows.append([str(case), str(each), str(case.needed_each), str(once), str(case.needed_once)])
        content[str(case)] = {
            "each": vars(each),
            "needed_each": vars(case.needed_each),
            "once": vars(once),
            "needed_once": vars(case.needed_once),
        }
    print("events made / events recorded / waits / record_stream calls\n")
    header = ["", "each micro-batch", "needed", "once in a step", "needed"]
    harness.print_table(header, rows)
    print()
    for what, column in (("each micro-batch", 0), ("once in a step", 1)):
        worst = max(
            (each_or_once[column].total - (case.needed_each, case.needed_once)[column].total, str(case))
            for case, each_or_once in measured.items()
        )
        verdicts.append(Verdict(f"more than needed {what} ({worst[1]})", worst[0], 0.0, "operations"))
    harness.conclude("stream_operations", arguments, machine, verdicts, {"cases": content})


if __name__ == "__main__":
    main()
