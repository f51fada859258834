"""A plan: the cut, the schedule, the devices and micro-batches of a pipe, and what they are predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from pipework.planning.certificate import Certificate
from pipework.planning.json_file import check_numbers, text_of_file
from pipework.planning.plan_file import parse, text_of
from pipework.planning.profiles.layer_costs import LayerInfo
from pipework.planning.search.candidate import WorkerBytes
from pipework.schedule import Costs, Schedule, Simulation, Timeline, simulate, svg, to_csv, without_recompute
from pipework.schedule.argument_checks import positive_integers
from pipework.schedule.draw.units import aligned, counted, memory_text, time_text
from pipework.schedule.edges import recomputed

if TYPE_CHECKING:
    from pipework.planning.search.candidate import Candidate


@dataclass(frozen=True)
class Plan:
    """What is chosen for a pipe; `print` it for a table, give it to `Pipe(module, plan=plan)`.

    Attributes:
        devices: of each worker.
        balance: the number of layers of each stage.
        chunks: the number of micro-batches.
        batch: the rows of a mini-batch.
        schedule: all actions, with recomputation.
        costs: of the stages' actions, in seconds and bytes.
        workers: the bytes that each worker holds at most.
        layers: of the model.
        certificate: lower bounds of the step.
        optimizer: the numbers that the optimizer keeps for each trained parameter.
        named: the seconds of the best candidate of each schedule that has a name, and fits.
        estimated: whether times are not measured.
        notes: what there is to know beside that, a line each.
        profile_seconds: the time of a step by the profile, which is what `named` are to be compared with, if the stages
            were measured as a whole since; None: they were not.

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
    certificate: Certificate
    optimizer: float
    named: Mapping[str, float]
    estimated: bool = False
    notes: tuple[str, ...] = ()
    profile_seconds: float | None = None

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
        positive_integers(**{f"balance[{stage}]": each for stage, each in enumerate(self.balance)})
        positive_integers(batch=self.batch)
        self.costs.spread(schedule.stages, len(schedule.skips))  # refuses those of other stages
        bound, own = self.certificate, self.profile_seconds
        check_numbers("times of the plan", (bound.schedule_bound, bound.any_bound, *dict(self.named).values()))
        check_numbers("times of the plan", () if own is None else (own,))
        check_numbers("bytes of its workers", (each for held in self.workers for each in astuple(held)[:3]))
        for held in self.workers:
            if not isinstance(held.limit, int | float) or not held.limit > 0:
                raise ValueError(f"a worker of the plan has the limit {held.limit!r}: wanted bytes above 0")
        check_numbers("numbers of the optimizer", (self.optimizer,))
        if not all(isinstance(each, str) for each in (*self.devices, *self.notes)):
            raise TypeError("devices and notes of the plan: wanted texts")

    @classmethod
    def of(
        cls, candidate: Candidate, certificate: Certificate, named: Mapping[str, float], notes: Sequence[str] = ()
    ) -> Plan:
        """The plan of a candidate."""
        request, choice = candidate.request, candidate.choice
        return cls(
            devices=tuple(request.devices[index] for index in choice.order),
            balance=choice.balance,
            chunks=choice.chunks,
            batch=request.batch,
            schedule=candidate.schedule,
            costs=candidate.costs,
            workers=candidate.workers,
            layers=request.profile.layers,
            certificate=certificate,
            optimizer=request.optimizer,
            named=dict(named),
            estimated=any(request.profile.kinds[kind].estimated for kind in request.kinds),
            notes=tuple(notes),
        )

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

    @property
    def gap(self) -> float:
        """The excess of the step over the bound of all schedules of its stages, as a share of that."""
        bound = self.certificate.schedule_bound
        return self.seconds / bound - 1 if bound else 0.0

    def __str__(self) -> str:
        schedule, step = self.schedule, self.seconds
        rows = [("worker", "device", "layers", "busy", "recomputes", "weights, gradients, optimizer",
                 "activations", "temporary", "total", "limit")]  # fmt: skip
        again = recomputed(schedule)
        names = [layer.name for layer in self.layers]
        spans = list(pairwise(accumulate(self.balance, initial=0)))
        for worker, held in enumerate(self.workers):
            stages = schedule.stages_of(worker)
            layers = "; ".join(_span(names, *spans[stage]) for stage in stages)
            repeats = [f"{sum(where == stage for where, _ in again)} of {self.chunks}" for stage in stages]
            rows.append(
                (
                    str(worker), self.devices[worker], layers,
                    f"{time_text(self.simulation.busy[worker], 's')}",
                    "; ".join(dict.fromkeys(repeats)) if again else "-",
                    memory_text(held.fixed, "bytes"), memory_text(held.activations, "bytes"),
                    memory_text(held.temporary, "bytes"), memory_text(held.total, "bytes"),
                    "-" if held.limit == inf else memory_text(held.limit, "bytes"),
                )
            )  # fmt: skip
        bound = self.certificate
        rate = "estimated" if self.estimated else "predicted"
        before = self.profile_seconds
        own = "" if before is None else f"; by the profile, this plan takes {time_text(before, 's')}"
        return "\n".join(
            [
                f"plan: {counted(sum(self.balance), 'layer')} on {counted(len(self.devices), 'worker')}, "
                f"{counted(self.chunks, 'micro-batch')} of {'up to ' if self.batch % self.chunks else ''}"
                f"{counted(-(-self.batch // self.chunks), 'row')}, "
                f"schedule {schedule.name!r}",
                *(line.rstrip() for line in aligned(rows, left={1, 2})),
                f"step {time_text(step, 's')} {rate}, bubble {self.simulation.bubble:.1%}; "
                f"{_rate_text(self.batch / step)} rows a second"
                if step
                else "step 0 s",
                f"lower bound {time_text(bound.schedule_bound, 's')} for these stages (gap {self.gap:.1%}), "
                f"{time_text(bound.any_bound, 's')} for any plan",
                f"what binds: {bound.binding}",
                *([f"best schedules with a name, by the profile: {self._best_named}{own}"] if self.named else []),
                *self.notes,
            ]
        )

    @property
    def _best_named(self) -> str:
        best = sorted(self.named.items(), key=lambda item: item[1])[:3]
        return ", ".join(f"{name} {time_text(seconds, 's')}" for name, seconds in best)

    def _repr_svg_(self) -> str:
        return svg(self.timeline)

    def save(self, path: str | Path) -> None:
        """Write it in the format of the file's ending.

        Args:
            path: ``.json``, which :meth:`load` reads; ``.csv``, the schedule for PyTorch, without recomputation
                and skip connections, which that format does not have; ``.svg``, a picture.

        Raises:
            ValueError: the ending is another one.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix not in (".json", ".csv", ".svg"):
            raise ValueError(f"{path}: a plan is saved as .json, .csv or .svg, not as {path.suffix!r}")
        if path.suffix == ".csv":
            text = to_csv(replace(without_recompute(self.schedule), skips=()))
        else:
            text = text_of(self) if path.suffix == ".json" else self._repr_svg_()
        path.write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` has written as JSON.

        Raises:
            ValueError: the file is no plan.
            OSError: it cannot be read.
        """
        return parse(text_of_file(path), str(path), cls)

    def check_model(self, layers: Sequence[LayerInfo]) -> None:
        """Refuse another model than the planned one.

        Raises:
            ValueError: it has another number of layers, or a layer has another name, class or size.
        """
        if len(layers) != len(self.layers):
            raise ValueError(
                f"the plan is for a model of {counted(len(self.layers), 'layer')}, and this one has {len(layers)}: "
                "plan this model"
            )
        for planned, found in zip(self.layers, layers, strict=True):
            if planned != found:
                raise ValueError(
                    f"the plan is for another model: layer {planned.name} was {_described(planned)}, and is "
                    f"{_described(found)} here; plan this model"
                )


def _span(names: Sequence[str], begin: int, end: int) -> str:
    return names[begin] if end == begin + 1 else f"{names[begin]} .. {names[end - 1]}"


def _rate_text(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _described(layer: LayerInfo) -> str:
    weights, buffers = (memory_text(size, "bytes") for size in (layer.weights, layer.buffers))
    parts = [f"{layer.type} {layer.name!r} of {weights}"]
    if layer.trained != layer.weights:
        parts.append(f"{memory_text(layer.trained, 'bytes')} of them trained")
    if layer.buffers:
        parts.append(f"buffers of {buffers}")
    return " with ".join(parts)
