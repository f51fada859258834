"""A plan: the cut, the schedule, the devices and micro-batches of a pipe, and what they are predicted to cost."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, zip_longest
from math import inf
from pathlib import Path
from typing import Any

from pipework.planning.json_file import SavedAsJson, check_numbers
from pipework.planning.layer_costs import LayerInfo
from pipework.schedule import (
    Costs,
    Schedule,
    Simulation,
    Timeline,
    from_json,
    lower_bound,
    simulate,
    svg,
    to_csv,
    to_json,
)
from pipework.schedule.analysis.memory import SLACK
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.draw.units import aligned, counted, memory_text, time_text
from pipework.schedule.edges import offloaded, recomputed


@dataclass(frozen=True)
class WorkerBytes:
    """The most bytes that a worker holds.

    Attributes:
        fixed: weights, gradients, buffers and the optimizer's state.
        activations: of the micro-batches in flight.
        temporary: what an action needs beside that, and messages.
        limit: the most that it may hold; infinity: no limit.
        host: what its micro-batches take in the memory of the host; not part of the total.
    """

    fixed: float
    activations: float
    temporary: float
    limit: float
    host: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.fixed + self.activations + self.temporary

    @property
    def fits(self) -> bool:
        """Whether it is within the limit."""
        return self.total <= self.limit * SLACK


@dataclass(frozen=True)
class Plan(SavedAsJson):
    """What is chosen for a pipe; `print` it for a table, give it to `Pipe(module, plan=plan)`.

    Attributes:
        devices: of each worker.
        balance: the number of layers of each stage.
        chunks: the number of micro-batches.
        batch: the rows of a mini-batch.
        schedule: all actions, with recomputation, and with ``O`` and ``L`` where activations go to host memory.
        costs: of the stages' actions, in seconds and bytes.
        workers: the bytes that each worker holds at most.
        layers: of the model.
        optimizer: the numbers that the optimizer keeps for each trained parameter.
        named: the seconds of the best candidate of each schedule that has a name, and fits.
        estimated: whether times are not measured.
        notes: what there is to know beside that, a line each.

    Raises:
        TypeError: an attribute has a wrong type.
        ValueError: numbers of devices, stages, layers or micro-batches do not go together, or a number is out of range.
    """

    devices: tuple[str, ...]
    balance: tuple[int, ...]
    chunks: int
    batch: int
    schedule: Schedule
    costs: Costs
    workers: tuple[WorkerBytes, ...]
    layers: tuple[LayerInfo, ...]
    optimizer: float
    named: Mapping[str, float]
    estimated: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        schedule = self.schedule
        for what, found, wanted in (
            ("devices", len(self.devices), schedule.workers),
            ("workers", len(self.workers), schedule.workers),
            ("parts of the balance", len(self.balance), schedule.stages),
            ("micro-batches", self.chunks, schedule.micro_batches),
            ("layers", len(self.layers), sum(self.balance)),
        ):
            if found != wanted:
                raise ValueError(f"the plan has {found} {what}, and its other parts are for {wanted}")
        positive_integers(batch=self.batch, **{f"balance[{stage}]": each for stage, each in enumerate(self.balance)})
        self.costs.spread(schedule.stages, len(schedule.skips))  # refuses those of other stages
        check_numbers("times of the plan", dict(self.named).values())
        check_numbers("numbers of the optimizer", (self.optimizer,))
        for held in self.workers:
            limit = 0 if held.limit == inf else held.limit
            check_numbers("bytes of its workers", (held.fixed, held.activations, held.temporary, limit, held.host))
        if not all(isinstance(each, str) for each in (*self.devices, *self.notes)):
            raise TypeError("devices and notes of the plan: wanted texts")

    @cached_property
    def simulation(self) -> Simulation:
        """Of a step."""
        return simulate(self.schedule, self.costs)

    @property
    def timeline(self) -> Timeline:
        """Of the simulation, for pictures."""
        return replace(self.simulation.timeline, unit="s", memory_unit="bytes")

    @property
    def seconds(self) -> float:
        """The predicted time of a step, without the optimizer."""
        return self.simulation.makespan

    @cached_property
    def bound(self) -> float:
        """The seconds that no schedule undercuts with these stages, micro-batches, recomputation and limits."""
        schedule, peaks = self.schedule, self.simulation.peak_memory
        again = Counter(stage for stage, _ in recomputed(schedule))
        limits = [
            max(held.limit - held.fixed - held.temporary, peak) for held, peak in zip(self.workers, peaks, strict=True)
        ]
        return lower_bound(
            schedule.placement,
            schedule.micro_batches,
            self.costs,
            # The bound knows no host memory, which lets more micro-batches be in flight.
            memory_limit=None if offloaded(schedule) else limits,
            recomputed=[again[stage] for stage in range(schedule.stages)],
        )

    @property
    def gap(self) -> float:
        """The excess of the step over `bound`, as a share of `bound`."""
        # Rounding may put a bound above what is reached.
        return max(0.0, self.seconds / self.bound - 1) if self.bound else 0.0

    def __str__(self) -> str:
        schedule, step = self.schedule, self.seconds
        again, away = (Counter(stage for stage, _ in each(schedule)) for each in (recomputed, offloaded))
        rows: list[tuple[str, ...]] = [
            ("worker", "device", "layers", "busy", "recomputes", "weights, gradients, optimizer", "activations",
             "temporary", "total", "limit", "offloads", "in host memory"),
        ]  # fmt: skip
        names = [layer.name for layer in self.layers]
        spans = list(pairwise(accumulate(self.balance, initial=0)))
        for worker, held in enumerate(self.workers):
            stages = schedule.stages_of(worker)
            ends = ((names[begin], names[end - 1]) for begin, end in map(spans.__getitem__, stages))
            sizes = (held.fixed, held.activations, held.temporary, held.total)
            rows.append(
                (
                    str(worker),
                    self.devices[worker],
                    "; ".join(" .. ".join(dict.fromkeys(each)) for each in ends),
                    time_text(self.simulation.busy[worker], "s"),
                    self._shares(again, stages),
                    *(memory_text(size, "bytes") for size in sizes),
                    "-" if held.limit == inf else memory_text(held.limit, "bytes"),
                    self._shares(away, stages),
                    memory_text(held.host, "bytes"),
                )
            )
        shown = len(rows[0]) if away else -2
        rate = self.batch / step if step else inf
        rows_text = f"{'up to ' if self.batch % self.chunks else ''}{counted(-(-self.batch // self.chunks), 'row')}"
        lines = [
            f"plan: {counted(len(self.layers), 'layer')} on {counted(len(self.devices), 'worker')}, "
            f"{counted(self.chunks, 'micro-batch')} of {rows_text}, schedule {schedule.name!r}",
            *(line.rstrip() for line in aligned([row[:shown] for row in rows], left={1, 2})),
            f"step {time_text(step, 's')} {'estimated' if self.estimated else 'predicted'}, "
            f"bubble {self.simulation.bubble:.1%}; {rate:{',.0f' if rate >= 100 else '.3g'}} rows a second",
            f"lower bound {time_text(self.bound, 's')} for these stages (gap {self.gap:.1%})",
        ]
        if self.named:
            best = sorted(self.named.items(), key=lambda item: item[1])[:3]
            text = ", ".join(f"{name} {time_text(seconds, 's')}" for name, seconds in best)
            lines.append(f"best schedules with a name, by the profile: {text}")
        return "\n".join([*lines, *self.notes])

    def _shares(self, count: Mapping[int, int], stages: Sequence[int]) -> str:
        """For how many micro-batches of each stage of a worker something is done."""
        return "; ".join(dict.fromkeys(f"{count[stage]} of {self.chunks}" for stage in stages)) if count else "-"

    def _repr_svg_(self) -> str:
        return svg(self.timeline)

    def save(self, path: str | Path) -> None:
        """Write it in the format of the file's ending.

        Args:
            path: ``.json``, which :meth:`load` reads; ``.csv``, the schedule for PyTorch, without recomputation, copies
                to the host and skip connections, which that format does not have; ``.svg``, a picture.

        Raises:
            ValueError: the ending is another one.
            OSError: the file cannot be written.
        """
        path = Path(path)
        texts = {".json": self.to_json, ".csv": self._to_csv, ".svg": self._repr_svg_}
        if path.suffix not in texts:
            raise ValueError(f"{path}: a plan is saved as {', '.join(texts)}, not as {path.suffix!r}")
        path.write_text(texts[path.suffix](), encoding="utf-8")

    def _to_csv(self) -> str:
        schedule = self.schedule
        known = {kind for kind, row in schedule.table.items() if row.always or row.adds}
        orders = tuple(tuple(action for action in order if action.kind in known) for order in schedule.orders)
        return to_csv(replace(schedule, orders=orders, skips=()))

    def _written(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in vars(self).items() if name in self.__dataclass_fields__},
            "workers": [{**vars(held), "limit": None if held.limit == inf else held.limit} for held in self.workers],
            "costs": {name: value for name, value in asdict(self.costs).items() if value is not None},
            "schedule": json.loads(to_json(self.schedule)),
        }

    @classmethod
    def _read(cls, fields: dict[str, Any]) -> dict[str, Any]:
        workers = ({**each, "limit": inf if each["limit"] is None else each["limit"]} for each in fields["workers"])
        for name in ("certificate", "profile_seconds"):  # plans had them before
            fields.pop(name, None)
        return {
            **fields,
            **{name: tuple(fields[name]) for name in ("devices", "balance", "notes")},
            "workers": tuple(WorkerBytes(**each) for each in workers),
            "costs": Costs(**fields["costs"]),
            "layers": tuple(LayerInfo(*each) for each in fields["layers"]),
            "schedule": from_json(json.dumps(fields["schedule"])),
        }

    def check_model(self, layers: Sequence[LayerInfo]) -> None:
        """Refuse another model than the planned one.

        Raises:
            ValueError: it has another number of layers, or a layer has another name, class or size.
        """
        for number, (planned, found) in enumerate(zip_longest(self.layers, layers)):
            if planned != found:
                raise ValueError(
                    f"the plan is for another model: layer {number} was {planned}, and is {found} here; plan this model"
                )
