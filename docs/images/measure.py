"""Runs pipes and saves what was measured: `PYTHONPATH=. python docs/images/measure.py`.

Each picture has the predicted above the measured timeline of a step, as `pipe.record()` saves it: `measured_zb_h1.svg`,
or those of the schedules named on the command line. The runtime is the real one. Its
layers sleep instead of computing, so that two cores stand for four devices: a forward of a worker's share of the model
takes 5 ms, and so does each half of a backward. Run it while nothing else runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.sleeping import Alarm, Sleeper, sleeping_in_halves, without_timer_slack
from pipework import Pipe
from pipework.schedule import schedule_spec
from pipework.timeline.recording import Recording

HERE = Path(__file__).parent
SCHEDULES = ("zb-h1",)
WORKERS, MICRO_BATCHES = 4, 8
UNIT = 5e-3  # seconds
STEPS = 9


def loss_of(output: Tensor, _: Tensor) -> Tensor:
    """Next to nothing."""
    return output.sum()


class Stage(nn.Module):
    """Sleeps, and holds 8 KiB of each micro-batch for its backward, so that there is memory to be seen."""

    def __init__(self, alarm: Alarm, unit: float) -> None:
        super().__init__()
        self.sleeper = Sleeper(alarm, unit, 2 * unit, weight_share=0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = self.sleeper(torch.tanh(x.expand(-1, 2048)))
        return wide.sum(1, keepdim=True)


def measured(schedule: str) -> Recording:
    """Of some steps of a pipe with that schedule, the shortest: the one that other processes disturbed least."""
    per_worker = schedule_spec(schedule).stages_per_worker
    stages, unit = WORKERS * per_worker, UNIT / per_worker
    alarm = Alarm()
    alarm.calibrate(WORKERS, unit)
    pipe = Pipe(
        nn.Sequential(*(Stage(alarm, unit) for _ in range(stages))),
        MICRO_BATCHES,
        "never",
        balance=[1] * stages,
        devices=["cpu"] * WORKERS,
        schedule=schedule,
        loss_fn=loss_of,
    )
    batch = torch.zeros(MICRO_BATCHES, 1, requires_grad=True)
    target = torch.zeros(MICRO_BATCHES, 1)
    # The first step starts the workers, and shows that gradients can wait.
    pipe(batch, target=target).backward()
    steps = []
    for _ in range(STEPS):
        with pipe.record() as recording:
            pipe(batch, target=target).backward()
        steps.append(recording)
    return min(steps, key=lambda step: step.timeline().makespan)


def main(schedules: list[str]) -> None:
    """Save a picture of each."""
    torch.set_num_threads(1)
    without_timer_slack()
    with sleeping_in_halves():
        for schedule in schedules or SCHEDULES:
            recording = measured(schedule)
            file = HERE / f"measured_{schedule.replace('-', '_')}.svg"
            recording.save(file)
            predicted, real = recording.predicted().makespan, recording.timeline().makespan
            print(f"{file.name}: predicted {1e3 * predicted:.1f} ms, measured {1e3 * real:.1f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
