"""What the forward, the backward and its halves take: the costs of the ideal steps.

One worker runs the whole model, with the loss inside, backwards whole or in halves. Alone on the machine it is what one
core can do at best. Beside a second worker that does the same, both cores share memory and caches, as they do in a
pipeline of two workers.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import median
from threading import Thread

from benchmarks import harness
from benchmarks.two_stage_speed.task import Task
from pipework.pipe import Pipe
from pipework.schedule import Costs

WHOLE_BACKWARDS, HALVES = "1f1b", "zb-h1"  # with one worker: one micro-batch after the other


class OneWorker:
    """A candidate: a worker with the whole model, perhaps beside others. Keeps the seconds of its kinds of actions.

    Args:
        task: the model and the mini-batch.
        schedule: with whole backwards or with halves.
        beside: how many others run at the same time.
    """

    def __init__(self, task: Task, schedule: str, beside: int) -> None:
        self._task = task
        self._batch = task.batch()
        self._pipes = [
            Pipe(
                task.model(), task.chunks, "never", balance=[task.blocks], devices=["cpu"], schedule=schedule,
                loss_fn=task.loss_of,
            )
            for _ in range(1 + beside)
        ]  # fmt: skip
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def __call__(self) -> float:
        """The seconds of a step."""
        recordings = []
        batch, target = self._batch

        def step(pipe: Pipe) -> None:
            pipe.zero_grad()
            with pipe.record(memory=False) as recording:
                pipe(batch, target=target).backward()
            recordings.append(recording)

        others = [Thread(target=step, args=(pipe,)) for pipe in self._pipes[1:]]
        for thread in others:
            thread.start()
        step(self._pipes[0])
        for thread in others:
            thread.join()
        timelines = [recording.timeline() for recording in recordings]
        sums: dict[str, float] = defaultdict(float)
        for each in timelines:
            for interval in each.intervals:
                sums[interval.action.kind] += (interval.end - interval.start) / len(timelines)
        for kind, seconds in sums.items():
            self._seconds[kind].append(seconds / self._task.chunks)
        return sum(sums.values())

    def of(self, kind: str, rounds: int, *, fastest: bool = False) -> float:
        """The seconds of an action on the whole model, in the last rounds; 0 if there is none."""
        times = self._seconds[kind][-rounds:] or [0.0]
        return min(times) if fastest else median(times)


class MeasuredCosts:
    """The costs on one machine.

    Args:
        task: the model and the mini-batch.
        beside: how many workers run at the same time as the measured one.
    """

    def __init__(self, task: Task, beside: int) -> None:
        self._task = task
        which = "beside another" if beside else "alone"
        self._workers = {schedule: OneWorker(task, schedule, beside) for schedule in (WHOLE_BACKWARDS, HALVES)}
        self.candidates: dict[str, harness.Candidate] = {
            f"one worker {which}, {'halves' if schedule == HALVES else 'whole backwards'}": worker
            for schedule, worker in self._workers.items()
        }

    def of_model(self, rounds: int) -> list[float]:
        """The seconds of F, B, F where backwards are split, I and W of the whole model, for a micro-batch."""
        whole, halves = self._workers[WHOLE_BACKWARDS], self._workers[HALVES]
        return [*(whole.of(kind, rounds) for kind in "FB"), *(halves.of(kind, rounds) for kind in "FIW")]

    def of(self, schedule: str, rounds: int, *, fastest: bool = False) -> Costs:
        """For a schedule, whose stages have equal parts of the model."""
        stages = len(self._task.balance(schedule))
        splits = self._task.splits(schedule)

        def part(kind: str, of: str) -> float:
            return self._workers[of].of(kind, rounds, fastest=fastest) / stages

        return Costs(
            forward=part("F", HALVES if splits else WHOLE_BACKWARDS),
            backward=part("B", WHOLE_BACKWARDS),
            input_gradient=part("I", HALVES),
            weight_gradient=part("W", HALVES),
        )
