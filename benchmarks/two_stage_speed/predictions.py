"""Is the time of a step what the simulation predicts from measured costs?

Three predictions stand beside the recorded steps. Two are the recording's: simulated with the costs of all recorded
steps (`Recording.predicted()`), and of each step with its own, which a machine that is slower in one step than in the
next does not mislead. The third is that of `pipe.predict()`, which has measured each stage by itself before the first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

from benchmarks import harness
from benchmarks.harness import Verdict
from pipework.pipe import Pipe
from pipework.schedule import simulate
from pipework.timeline import Recording

TOLERANCE = 5.0  # percent


@dataclass(frozen=True)
class Subject:
    """A pipe whose steps are predicted.

    Attributes:
        pipe: itself.
        step: times one of its steps.
        predict: asks `pipe.predict()` for the seconds of a step.
    """

    pipe: Pipe
    step: harness.Candidate
    predict: Callable[[], float]


@dataclass(frozen=True)
class Forecast:
    """What was predicted and what was measured, in seconds.

    Attributes:
        recorded: the makespan of each recorded step.
        predicted: by the recording, from the costs of all steps.
        by_step: the same for each step, from its own costs.
        before: by `pipe.predict()`.
    """

    recorded: list[float]
    predicted: float
    by_step: list[float]
    before: float

    @property
    def measured(self) -> float:
        return median(self.recorded)

    @property
    def off_by_step(self) -> float:
        """How far the predictions from each step's own costs are from that step, in percent."""
        return median(100 * (own / real - 1) for own, real in zip(self.by_step, self.recorded, strict=True))

    def off(self, prediction: float) -> float:
        """How far a prediction is from what was measured, in percent."""
        return 100 * (prediction / self.measured - 1)


def forecast(subjects: Mapping[str, Subject], steps: int) -> dict[str, Forecast]:
    """Records steps of all pipes in turns, and compares."""
    before = {name: subject.predict() for name, subject in subjects.items()}
    recordings: dict[str, Recording] = {}
    with ExitStack() as stack:
        for name, subject in subjects.items():
            recordings[name] = stack.enter_context(subject.pipe.record())
        harness.alternate({name: subject.step for name, subject in subjects.items()}, steps, warm_up=0)
    return {
        name: Forecast(
            [recording.timeline(number).makespan for number in recording.steps],
            recording.predicted().makespan,
            [replayed(recording, number) for number in recording.steps],
            before[name],
        )
        for name, recording in recordings.items()
    }


def replayed(recording: Recording, step: int) -> float:
    """The seconds of a step, predicted from its own costs."""
    found = recording.predicted(step)
    return simulate(found.schedule, recording.costs(step), loss_outside=found.options.loss_outside).makespan


def report(forecasts: Mapping[str, Forecast], steps: int) -> list[Verdict]:
    """Prints the table; returns the verdicts."""
    print(f"\npredicted and measured seconds of a step, the measured ones medians of {steps} recorded steps in turns\n")
    rows, verdicts = [], []
    for name, each in forecasts.items():
        rows.append(
            [
                name,
                f"{each.measured:.3f}",
                f"{each.predicted:.3f}",
                f"{each.off(each.predicted):+.1f}%",
                f"{each.off_by_step:+.1f}%",
                f"{each.before:.3f}",
                f"{each.off(each.before):+.1f}%",
            ]
        )
        verdicts.append(Verdict(f"prediction of {name}", abs(each.off_by_step), TOLERANCE, "%"))
    harness.print_table(
        ["", "measured", "from all steps' costs", "", "from each step's own", "pipe.predict()", ""], rows
    )
    return verdicts
