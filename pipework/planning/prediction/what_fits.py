"""Says which other settings of a pipe would fit, after memory has run out. It runs nothing on the full device."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.checkpoint import AS_SCHEDULED, MODES
from pipework.model.with_device import WithDevice
from pipework.planning.prediction.grouped import grouped
from pipework.planning.prediction.meta_copy import meta_copy
from pipework.planning.prediction.optimizer_bytes import optimizer_bytes
from pipework.planning.prediction.predict import measure_stages, predicted
from pipework.planning.prediction.stage_copy import Sample
from pipework.runtime.device import is_accelerator
from pipework.runtime.failure import add_note
from pipework.runtime.stage.loss import InnerLoss
from pipework.schedule import SCHEDULES, schedule_spec
from pipework.schedule.draw.aligned import aligned
from pipework.schedule.draw.units import counted, memory_text

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from pipework.assignment.assignment import Assignment
    from pipework.model.tuples import TupleRule
    from pipework.planning.prediction.mini_batch_form import MiniBatchForm
    from pipework.planning.prediction.optimizer_bytes import OptimizerBytes
    from pipework.planning.prediction.predict import Prediction
    from pipework.planning.prediction.stage_copy import Measured

_SECONDS = 5.0
_CERTAIN = 0.95  # of what there is: predictions are right within 5%
# Those that hold less, with one stage per worker, with several that go round, and with two in a wave.
_SMALLER = ("1f1b", "interleaved-1f1b", "v-half", "v-min")
_HINT = (
    "less is needed with more chunks, schedule='1f1b', checkpoint='always', or a balance that moves layers elsewhere"
)


class Setting:
    """What may be chosen of a pipe; `text` says how it differs from the present choice."""

    def __init__(self, balance: tuple[int, ...], schedule: Any, checkpoint: str, chunks: int, text: str = "as it is"):
        self.balance, self.schedule, self.checkpoint, self.chunks, self.text = (
            balance, schedule, checkpoint, chunks, text,
        )  # fmt: skip

    def but(self, text: str, **changes: Any) -> Setting:
        """Another one."""
        mine = {name: getattr(self, name) for name in ("balance", "schedule", "checkpoint", "chunks")}
        own = [] if self.text == "as it is" else [self.text]
        return Setting(**{**mine, **changes}, text=", ".join([*own, text]))


def note_what_fits(
    error: BaseException,
    assignment: Assignment,
    partitions: Sequence[nn.Sequential],
    loss: Any,
    call: MiniBatchForm,
    *,
    checkpoint: str,
    tuples: TupleRule,
    ordinary: bool,
) -> None:
    """Adds a note with a table of other settings, and of the bytes that each device would need.

    Layers run on copies on the meta device, which has no memory, for some seconds at most. Where that is not possible,
    the note says which call predicts more.

    Args:
        error: says that memory has run out.
        assignment: of the pipe.
        partitions: the layers of all stages.
        loss: the function that the last stage calls; None: there is none, or the last layer returns the loss.
        call: the mini-batch.
        checkpoint: the mode.
        tuples: how a tuple reaches a layer.
        ordinary: whether no autocast and no hooks change what layers save.
    """
    predict = f"pipe.predict(x{'' if call.target is None else ', target=y'})"
    try:
        if not ordinary or any(map(torch_private.is_compiled, nn.ModuleList(partitions).modules())):
            raise NotImplementedError("with autocast, hooks for saved tensors or compiled layers it would not be right")
        lines = _Predictions(assignment, partitions, loss, call, tuples).table(checkpoint)
    except Exception as problem:
        reason = str(problem).strip().split("\n")[0][:120] or type(problem).__name__
        lines = [f"what other settings need is not predicted ({reason}); before a step {predict} says it; {_HINT}"]
    with contextlib.suppress(RuntimeError, MemoryError):
        add_note(error, "\n".join(lines))


class _Predictions:
    """Predicts settings of one pipe for one mini-batch; stages that were measured once are not measured again."""

    def __init__(
        self,
        assignment: Assignment,
        partitions: Sequence[nn.Sequential],
        loss: Any,
        call: MiniBatchForm,
        tuples: TupleRule,
    ) -> None:
        self._until = time.perf_counter() + _SECONDS
        self._assignment = assignment
        self._call = call
        self._tuples = tuples
        self._stages = partitions
        self._layers = [pair for partition in partitions for pair in partition._modules.items()]
        copies, loss = meta_copy(
            ([dict(partition._modules) for partition in partitions], loss),
            [*partitions, *([loss] if isinstance(loss, nn.Module) else [])],
        )
        self._copies = [pair for named in copies for pair in named.items()]
        self._loss = None if call.target is None else InnerLoss(loss)
        self._optimizer = _optimizer_of([each for partition in partitions for each in partition.parameters()])
        self._measured: dict[Any, list[Measured]] = {}
        self._of_optimizer: dict[Any, OptimizerBytes] = {}

    def table(self, checkpoint: str) -> list[str]:
        """The lines of the note."""
        assignment = self._assignment
        present = Setting(assignment.partitioning.balance, assignment.source, checkpoint, self._call.micro_batches)
        now = self.predicted(present)
        room = self._room(now)
        rows, late = [self._row(present, now, None)], False
        tried: list[tuple[Setting, Prediction]] = []
        others = self._others(present, now, room)
        while True:
            try:
                tried.append(next(others))
            except StopIteration:
                break
            except _LateError:
                late = True
                break
        if not any(_fits(each, room) for _, each in tried):
            with contextlib.suppress(_LateError):
                tried += self._together(present, tried)
        # Only those that need less where it is tight.
        tight = max(now.device_bytes, key=lambda device: now.device_bytes[device] / room.get(device, torch.inf))
        if not room:
            tight = max(now.device_bytes, key=now.device_bytes.__getitem__)
        less = [pair for pair in tried if pair[1].device_bytes[tight] < 0.99 * now.device_bytes[tight]]
        rows += [self._row(setting, each, room) for setting, each in less]
        if room:
            there = [memory_text(room[each], "bytes") if each in room else "-" for each in now.device_bytes]
            rows.append(("there is", *there, ""))
        names = [str(device) for device in now.device_bytes]
        optimizer = "no optimizer" if self._optimizer is None else type(self._optimizer).__name__
        lines = [
            f"what a step of {counted(self._call.micro_batches, 'micro-batch')} and {optimizer} needs at once, "
            "predicted from copies without memory",
            *(line.rstrip() for line in aligned([("", *names, ""), *rows], left={0, len(names) + 1})),
        ]
        if not less and not late:
            lines.append(
                f"  no other setting that was tried needs less on {tight}, where it is mostly weights, gradients and "
                "the optimizer's state: use more devices, or an optimizer that keeps less"
            )
        return [*lines, *(["  there was no time for more: pipe.predict predicts other settings"] if late else [])]

    def predicted(self, setting: Setting) -> Prediction:
        """The prediction for a setting. Raises a ValueError if the schedule does not go with it."""
        assignment, call = replace(self._assignment, source=setting.schedule), self._call
        count = min(setting.chunks, call.rows) if call.rows else setting.chunks
        devices = assignment.partitioning.devices
        outside = call.target is None and setting.schedule == self._assignment.source
        schedule = assignment.recomputing(count, setting.checkpoint, loss_outside=outside)
        sample = call.sample(count, self._tuples, self._loss)
        splits = schedule.split_stages
        key = (setting.balance, count, splits)
        if key not in self._measured:
            self._measured[key] = self._measure(grouped(self._copies, setting.balance), sample, splits)
        own = grouped(self._layers, setting.balance)
        kept = sample if outside or sample.loss is not None else replace(sample, loss=InnerLoss(None))

        def of_optimizer(stages: Sequence[Iterable[nn.Parameter]], device: torch.device) -> OptimizerBytes:
            which = (setting.balance, device)
            if which not in self._of_optimizer:
                self._of_optimizer[which] = optimizer_bytes(self._optimizer, stages, device)
            return self._of_optimizer[which]

        return predicted(own, devices, schedule, kept, self._measured[key], call.batch, of_optimizer)

    def _measure(self, stages: Sequence[nn.Sequential], sample: Sample, split: Collection[int] = ()) -> list[Measured]:
        def in_time(_: str) -> None:
            if time.perf_counter() > self._until:
                raise _LateError("it takes too long")

        meta = torch.device("meta")
        with meta:  # also what layers make without saying where
            return measure_stages(stages, [meta] * len(stages), sample, None, in_time, split=split)[0]

    def _others(
        self, present: Setting, now: Prediction, room: Mapping[torch.device, float]
    ) -> Iterator[tuple[Setting, Prediction]]:
        """Settings that differ in one thing."""
        candidates = [*self._schedules(present)]
        stricter = () if present.checkpoint == AS_SCHEDULED else MODES[: MODES.index(present.checkpoint)]
        candidates += [present.but(f"checkpoint={mode!r}", checkpoint=mode) for mode in reversed(stricter)]
        for setting in candidates:
            with contextlib.suppress(ValueError):  # the schedule is not for such numbers
                yield setting, self.predicted(setting)
        for factor in (2, 4, 8):
            if factor * present.chunks <= self._call.rows:
                setting = present.but(f"chunks={factor * present.chunks}", chunks=factor * present.chunks)
                with contextlib.suppress(ValueError):
                    each = self.predicted(setting)
                    yield setting, each
                    if _fits(each, room):
                        break
        balance = self._balance(present, now, room)
        if balance != present.balance:
            setting = present.but(f"balance={list(balance)}", balance=balance)
            yield setting, self.predicted(setting)

    def _together(
        self, present: Setting, tried: Sequence[tuple[Setting, Prediction]]
    ) -> Iterator[tuple[Setting, Prediction]]:
        """All that was tried, at once."""
        both = present
        for name in ("schedule", "checkpoint", "chunks", "balance"):
            changed = [each for each, _ in tried if getattr(each, name) != getattr(present, name)]
            if changed:
                both = both.but(changed[-1].text, **{name: getattr(changed[-1], name)})
                if both.text != changed[-1].text:
                    with contextlib.suppress(ValueError):
                        yield both, self.predicted(both)

    def _schedules(self, present: Setting) -> Iterator[Setting]:
        assignment = self._assignment
        if not isinstance(present.schedule, str):
            return
        per_worker = len(assignment.placement) // assignment.workers
        for name in _SMALLER:
            spec = SCHEDULES[name]
            if spec is schedule_spec(present.schedule) or not (spec.several or spec.stages_per_worker == per_worker):
                continue
            if per_worker == 1 and spec.several:
                continue
            if spec.placement(assignment.workers, per_worker) == assignment.placement:
                inside = "" if self._call.target is not None else " with pipe(x, target=y)"
                yield present.but(f"schedule={name!r}{inside}", schedule=name)

    def _balance(self, present: Setting, now: Prediction, room: Mapping[torch.device, float]) -> tuple[int, ...]:
        """The balance that is best if a stage needs what its layers need, each alone."""
        if any(isinstance(layer, WithDevice) for _, layer in self._layers) or len(present.balance) < 2:
            return present.balance
        count = now.simulation.schedule.micro_batches
        alone = [nn.Sequential(OrderedDict([pair])) for pair in self._copies]
        sample = self._call.sample(count, self._tuples, self._loss)
        kept = [one.activation for one in self._measure(alone, sample)]
        weights = sum(stage.weights for stage in now.stages)
        others = sum(stage.optimizer + stage.gradients + stage.weights for stage in now.stages)
        factor = others / weights if weights else 1.0
        fixed = [factor * sum(each.nbytes for each in layer.parameters()) for _, layer in self._layers]
        of_stages = [one.activation for one in self._measured_now(present)]
        held = [stage.activations / max(1, one) for stage, one in zip(now.stages, of_stages, strict=True)]
        capacity = [room.get(device, 1.0) if room else 1.0 for device in now.devices]
        sums = [list(itertools.accumulate(each, initial=0.0)) for each in (fixed, kept)]

        def need(stage: int, begin: int, end: int) -> float:
            return (sums[0][end] - sums[0][begin] + held[stage] * (sums[1][end] - sums[1][begin])) / capacity[stage]

        best: list[tuple[float, tuple[int, ...]]] = [
            (0.0, ()),
            *[(torch.inf, ())] * len(alone),
        ]  # for the first layers: the largest need, and the balance
        for stage in range(len(present.balance)):
            best = [
                min(
                    (
                        (max(best[begin][0], need(stage, begin, end)), (*best[begin][1], end - begin))
                        for begin in range(end)
                        if best[begin][0] < torch.inf
                    ),
                    default=(torch.inf, ()),
                )
                for end in range(len(alone) + 1)
            ]
        return best[-1][1] or present.balance

    def _measured_now(self, present: Setting) -> list[Measured]:
        return next(one for (balance, _, _), one in self._measured.items() if balance == present.balance)

    def _room(self, now: Prediction) -> dict[torch.device, float]:
        """For each accelerator the bytes that a step of this pipe may have."""
        room: dict[torch.device, float] = {}
        measured = next(iter(self._measured.values()))
        for device in now.device_bytes:
            if not is_accelerator(device):
                continue
            free, _ = torch.accelerator.get_memory_info(device)
            own = [number for number, other in enumerate(now.devices) if other == device]
            needs = [measured[n].actions for n in own]
            # The error's traceback still holds the tensors of an action.
            action = max(max(one.forward.most, *(each.most for each in one.backward)) for one in needs)
            known = action + sum(size for place, size in self._call.batch if place == device)
            for number in own:
                layers = self._stages[number]
                parameters, buffers = [*layers.parameters()], layers.buffers()
                known += sum(each.nbytes for each in (*parameters, *buffers))
                known += sum(each.grad.nbytes for each in parameters if each.grad is not None)
                known += sum(map(self._state_bytes, parameters))
            others = max(0, torch.accelerator.memory_allocated(device) - known)
            room[device] = free + torch.accelerator.memory_reserved(device) - others
        return room

    def _state_bytes(self, parameter: Tensor) -> int:
        state = {} if self._optimizer is None else self._optimizer.state.get(parameter, {})
        return sum(
            value.nbytes for value in state.values() if isinstance(value, Tensor) and value.device == parameter.device
        )

    def _row(
        self, setting: Setting, prediction: Prediction, room: Mapping[torch.device, float] | None
    ) -> tuple[str, ...]:
        sizes = [memory_text(size, "bytes") for size in prediction.device_bytes.values()]
        if room is None:
            return (setting.text, *sizes, "did not fit")
        verdict = "" if not room else "fits" if _fits(prediction, room) else "too much"
        if verdict == "too much" and _fits(prediction, room, 1.0):
            verdict = "may fit"
        return (setting.text, *sizes, verdict)


class _LateError(Exception):
    """There is no more time."""


def _fits(prediction: Prediction, room: Mapping[torch.device, float], share: float = _CERTAIN) -> bool:
    return bool(room) and all(prediction.device_bytes[device] <= share * size for device, size in room.items())


def _optimizer_of(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer that has the most of these parameters; a pipe is not told of it."""
    own = {id(each) for each in parameters}
    best, most = None, 0
    for each in gc.get_objects():
        if issubclass(type(each), torch.optim.Optimizer):
            count = sum(id(one) in own for group in each.param_groups for one in group["params"])
            if count > most:
                best, most = each, count
    return best
