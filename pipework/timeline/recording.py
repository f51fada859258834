"""A recording of measured steps, which `with pipe.record() as timeline:` returns.

The runtime calls :meth:`Recording.begin` and :meth:`Recording.add`; the other methods are for users.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from pipework.schedule import Costs, Interval, Schedule, Simulation, Timeline, simulate, svg
from pipework.schedule.action import neighbour
from pipework.timeline.trace import trace_json


@dataclass
class _Step:
    schedule: Schedule
    loss_outside: bool
    intervals: list[Interval] = field(default_factory=list)

    @property
    def forwards_only(self) -> bool:
        """Whether nothing of a backward was recorded."""
        return not any(self.schedule.table[each.action.kind].phase == "backward" for each in self.intervals)

    def timeline(self, title: str = "") -> Timeline:
        table = self.schedule.table
        copies = table.letters(scope="copy")
        rows = ([each for each in self.intervals if (each.action.kind in copies) == beside] for beside in (False, True))
        computing, copying = map(tuple, rows)
        line = Timeline(computing, self.schedule.workers, "s", "bytes", title, copying, table)
        return line.normalised()


class Recording:
    """Measured steps of a pipe.

    Args:
        counts: whether the numbers only count what is recorded here: then titles have "mini-batch 1 of 3" instead of
            "step 0".
        memory: whether the runtime counts bytes, too, which makes operators slower; otherwise they are 0.

    Example:
        >>> from pipework.schedule import Action, fill_drain
        >>> recording = Recording()
        >>> recording.begin(0, fill_drain(1, 1), loss_outside=True)
        >>> recording.add(0, [Interval(0, Action("F", 0, 0), 5.0, 5.5), Interval(0, Action("B", 0, 0), 5.5, 6.5)])
        >>> recording.timeline().makespan, recording.costs().forward
        (1.5, (0.5,))
    """

    def __init__(self, *, counts: bool = False, memory: bool = True) -> None:
        self._counts = counts
        self.memory = memory
        self._steps: dict[int, _Step] = {}

    def __repr__(self) -> str:
        return f"Recording({len(self._steps)} steps)"

    def begin(self, step: int, schedule: Schedule, *, loss_outside: bool) -> None:
        """Begins a step.

        Args:
            step: its number, from 0.
            schedule: its schedule; a last batch may have fewer micro-batches.
            loss_outside: whether its loss is computed outside of the pipe.
        """
        self._steps[step] = _Step(schedule, loss_outside)

    def add(self, step: int, intervals: Iterable[Interval]) -> None:
        """Adds intervals to a step that has begun; a step with the loss outside has two runs.

        Args:
            step: its number.
            intervals: in seconds of a clock that all workers share, and in bytes.
        """
        self._steps[step].intervals.extend(interval._replace(step=step) for interval in intervals)

    @property
    def steps(self) -> list[int]:
        """The numbers of the recorded steps, in order of recording."""
        return list(self._steps)

    def timeline(self, step: int = -1) -> Timeline:
        """The measured timeline of a step.

        Args:
            step: its number; -1 is the last recorded, -2 the one before it, ..

        Returns:
            A timeline in seconds that starts at 0, with memory in bytes.

        Raises:
            ValueError: the step was not recorded.
        """
        number, record = self._find(step)
        title = f"measured: {record.schedule.title}"
        if not self._counts:
            title += f", step {number}"
        elif len(self._steps) > 1:
            title += f", mini-batch {self.steps.index(number) + 1} of {len(self._steps)}"
        return record.timeline(title)

    def bubble(self, step: int | None = None) -> float:
        """The measured idle share of workers x makespan, from 0 to 1.

        Args:
            step: of this step; None: the median of all steps.

        Raises:
            ValueError: the step was not recorded.
        """
        if step is not None:
            return self.timeline(step).bubble
        self._find(-1)
        return median(self.timeline(number).bubble for number in self._steps)

    def costs(self, step: int | None = None) -> Costs:
        """Measured costs: for each stage the median time of each kind of action, and the memory of a micro-batch.

        Times are in seconds, memory in bytes. What a stage never did follows from what it did: half a backward for
        each half, both halves for a backward, a forward for a recompute. Times of actions do not include waiting; a
        transfer is measured if a worker waited for it.

        Args:
            step: of this step only; None: of all steps.

        Raises:
            ValueError: the step was not recorded, or steps have different stages.
        """
        number, record = self._find(-1 if step is None else step)
        records = list(self._steps.values()) if step is None else [record]
        for other in records:
            if other.schedule.placement != record.schedule.placement:
                raise ValueError(f"the recorded steps have different stages: choose one, such as costs(step={number})")
        return measured_costs([each.timeline() for each in records], record.schedule.stages)

    def predicted(self, step: int = -1) -> Simulation:
        """Simulate the schedule of a step with the measured :meth:`costs`.

        Raises:
            ValueError: the step was not recorded, or it ran forwards only.
        """
        number, record = self._find(step)
        if record.intervals and record.forwards_only:
            raise ValueError(
                f"only forwards were recorded in step {number}, but the schedule has backwards: record a training "
                "step, with its backward inside `with pipe.record() as timeline:`"
            )
        return simulate(record.schedule, self.costs(), loss_outside=record.loss_outside)

    def save(self, path: str | Path) -> None:
        """Write a picture or a trace.

        Args:
            path: ``*.svg``: the predicted and, below it, the measured timeline of the last step;
                ``*.json``: all steps as a trace, for https://ui.perfetto.dev or chrome://tracing.

        Raises:
            ValueError: the name has another ending, or nothing was recorded.
            OSError: the file cannot be written.
        """
        path = Path(path)
        ending = path.suffix.lower()
        if ending not in (".svg", ".json"):
            raise ValueError(f"cannot save as {path.name!r}: the name must end in .svg (picture) or .json (trace)")
        self._find(-1)
        content = svg(self._pictured()) if ending == ".svg" else trace_json(self._all())
        path.write_text(content, encoding="utf-8")

    def _repr_svg_(self) -> str | None:
        return svg(self._pictured()) if self._steps else None

    def _pictured(self) -> list[Timeline]:
        _, record = self._find(-1)
        measured = self.timeline()
        if record.forwards_only:
            return [measured]  # Evaluation has no backwards, so the schedule predicts nothing.
        # The prediction uses measured costs, so it has their units.
        units: dict[str, Any] = {"unit": measured.unit, "memory_unit": measured.memory_unit}
        return [replace(self.predicted().timeline, title=f"predicted: {record.schedule.title}", **units), measured]

    def _all(self) -> Timeline:
        intervals = [interval for record in self._steps.values() for interval in record.intervals]
        widest = max((record.schedule for record in self._steps.values()), key=lambda schedule: schedule.workers)
        return _Step(widest, False, intervals).timeline("pipework")

    def _find(self, step: int) -> tuple[int, _Step]:
        if not self._steps:
            raise ValueError("nothing was recorded: run a training step inside `with pipe.record() as timeline:`")
        number = self.steps[step] if -len(self._steps) <= step < 0 else step
        if number not in self._steps:
            raise ValueError(f"step {step} was not recorded: choose one of {self.steps}, or -1 for the last")
        return number, self._steps[number]


def checked_step(step: int) -> int:
    """The number of a step.

    Raises:
        ValueError: it is negative, or not an integer.

    Example:
        >>> checked_step(-1)
        Traceback (most recent call last):
        ValueError: step is -1: wanted an integer of at least 0
    """
    if type(step) is not int or step < 0:
        raise ValueError(f"step is {step!r}: wanted an integer of at least 0")
    return step


_Samples = dict[tuple[str, int], list[float]]


def measured_costs(lines: Sequence[Timeline], stages: int) -> Costs:
    """The median times of each kind of action on each stage and of each transfer, and the memory of a micro-batch.

    A transfer is measured only if a worker waits for it: from the end of the action that makes the value to the start
    of the action that needs it. Transfers that no worker waits for cost 0; they do not affect the timeline.

    Args:
        lines: measured timelines of one step each, all with the same stages.
        stages: number of stages.

    Returns:
        Costs in the units of the timelines. What a stage never did follows from what it did: half a backward for each
        half, both halves for a backward, a forward for a recompute. Without any backward, backwards cost 0.

    Example:
        >>> from pipework.schedule import Action, Interval
        >>> line = Timeline((Interval(0, Action("F", 0, 0), 0.0, 2.0, held=64.0),), workers=1)
        >>> costs = measured_costs([line], stages=1)
        >>> costs.forward, costs.recompute, costs.activation
        ((2.0,), (2.0,), (64.0,))
    """
    samples: _Samples = defaultdict(list)
    for line in lines:
        rows = [(line.table[each.action.kind], each) for each in line.intervals]
        left = {each.action[1:3]: row.leaves for row, each in rows if row.leaves}
        for interval in line.communication:
            row, (_, stage, micro_batch, _) = line.table[interval.action.kind], interval.action
            if row.scope == "copy":
                of = " of inputs" if (stage, micro_batch) in left else ""
                samples[row.cost + of, stage].append(interval.end - interval.start)
                if row.phase == "forward" and not of:
                    samples[row.holds or "", stage].append(interval.held)
        for row, interval in rows:
            _, stage, micro_batch, _ = interval.action
            samples[row.cost, stage].append(interval.end - interval.start)
            if row.gives == "F":
                samples["message", stage].append(interval.sent)
                samples[left.get((stage, micro_batch), "activation"), stage].append(interval.held)
            elif row.holds:
                samples[row.holds, stage].append(interval.held)
        for boundary, delay in _delays(line):
            samples["transfer", boundary].append(delay)

    def typical(name: str, otherwise: Sequence[float] = (0.0,) * stages, count: int = stages) -> tuple[float, ...]:
        """The medians; for stages without a sample, the values of `otherwise`."""
        return tuple(median(samples.get((name, stage), [otherwise[stage]])) for stage in range(count))

    found = {name: typical(name) for name, _ in samples if name and not name.endswith(" of inputs")} | {
        name: typical(name, count=stages - 1) for name in ("transfer", "message")
    }
    for name in ("forward", "backward", "activation", "checkpoint_activation"):
        found[name] = typical(name)
    for name in ("offload", "reload"):
        # Where only inputs were copied: as long as for all that a micro-batch holds.
        columns = (typical(f"{name} of inputs"), found["activation"], found["checkpoint_activation"])
        longer = [time * whole / part if part else 0.0 for time, whole, part in zip(*columns, strict=True)]
        found[name] = typical(name, longer)
    half = tuple(time / 2 for time in found["backward"])
    halves = [typical(name, half) for name in ("input_gradient", "weight_gradient")]
    found["input_gradient"], found["weight_gradient"] = halves
    found["backward"] = typical("backward", tuple(map(sum, zip(*halves, strict=True))))
    found["recompute"] = typical("recompute", found["forward"])
    found["waiting"] = typical("waiting", found["activation"])
    return Costs(**found)


def _delays(line: Timeline) -> Iterator[tuple[int, float]]:
    """Boundaries with the time of a transfer, for each transfer that an idle worker waited for."""
    table = line.table
    made = {(table[kind].gives, *place): each for each in line.intervals for kind, *place, _ in [each.action]}
    for row in line.by_worker:
        free = line.start
        for interval in row:
            kind, stage, micro_batch, _ = interval.action
            product = table[kind].arrives
            before = neighbour(f"RECV_{product}", stage)
            source = made.get((product, before, micro_batch)) if product else None
            if source is not None and source.worker != interval.worker and source.end >= free:
                yield min(before, stage), max(0.0, interval.start - source.end)
            free = interval.end
