"""The most that each device holds during a step, from a simulated timeline and what each action needs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from pipework.planning.measuring.stage_copy import Need

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    from pipework.planning.measuring.stage_copy import ActionBytes
    from pipework.schedule import Action, Interval, Timeline


class Held(NamedTuple):
    """Bytes of weights and of gradients."""

    weights: int
    gradients: int


class Peak(NamedTuple):
    """The most that a device holds at one moment.

    Attributes:
        total: bytes, without what is there before the step.
        held: the weights and gradients among them.
    """

    total: int
    held: Held


_NOTHING = Held(0, 0)


def device_peaks(
    timeline: Timeline,
    measured: Sequence[ActionBytes],
    devices: Sequence[torch.device],
    outputs: Sequence[int] = (),
    held: Mapping[Action, Held] | None = None,
) -> dict[torch.device, Peak]:
    """Follows the timeline, and adds up on each device what actions need, graphs hold and messages bring.

    A message lies on the receiver's device from the end of the action that sends it to the end of the backward that
    needs it. Between two stages on one device it is the sender's own output, which the sender's graph holds as long.
    The same holds for what a skip connection brings, and for its gradient.

    Args:
        timeline: of a step.
        measured: of each stage's micro-batches.
        devices: of each stage.
        outputs: if the loss is outside, the bytes of each micro-batch's output: they are joined, and the joined output
            gets a gradient.
        held: during each action, weights and gradients on its device, beside the gradients of the stages whose backward
            has begun. None: nothing.

    Returns:
        The peak of each device.
    """
    memory = _Memory(measured, devices, timeline.intervals, outputs, held or {})
    moments: list[tuple[float, int, Interval]] = []
    for interval in timeline.intervals:
        moments.append((interval.start, 1, interval))
        # An action ends before the next one begins, but not before it has begun itself.
        moments.append((interval.end, 0 if interval.end > interval.start else 2, interval))
    for _, phase, interval in sorted(moments, key=lambda moment: moment[:2]):
        (memory.begin if phase == 1 else memory.end)(*interval.action[:3], interval)
    return dict(memory.peak)


class _Memory:
    """The memory of the devices while the timeline passes."""

    def __init__(
        self,
        measured: Sequence[ActionBytes],
        devices: Sequence[torch.device],
        intervals: Sequence[Interval],
        outputs: Sequence[int],
        held: Mapping[Action, Held],
    ) -> None:
        self._measured, self._devices, self._outputs, self._of_actions = measured, devices, outputs, held
        self._recomputed = {each.action[1:3] for each in intervals if each.action.kind == "R"}
        self._kept: dict[tuple[Hashable, int, int], int] = {}  # by what it is, stage and micro-batch
        self._live: dict[torch.device, int] = defaultdict(int)  # the sum of that
        self._needed: dict[torch.device, dict[Interval, Need]] = defaultdict(dict)  # by the actions that run now
        self._held: dict[torch.device, Held] = {}
        self._gradients: dict[torch.device, int] = defaultdict(int)
        self._has_gradients: set[int] = set()
        self._copied: set[int] = set()
        self._waiting: set[tuple[int, int]] = set()  # whose W needs the input
        self.peak: dict[torch.device, Peak] = defaultdict(lambda: Peak(0, _NOTHING))
        # For each stage that stashes, the skip and the stage that pops it, the lowest one of each device: that goes
        # backward last, and the others of the device pop the same tensor.
        self._sources: dict[Hashable, int] = {key: stage for stage, one in enumerate(measured) for key in one.stashed}
        lowest: dict[tuple[Hashable, torch.device], int] = {}
        for stage, one in enumerate(measured):
            for key in one.popped:
                lowest.setdefault((key, devices[stage]), stage)
        self._skips: dict[int, list[tuple[Hashable, int]]] = defaultdict(list)
        for (key, _), stage in lowest.items():
            self._skips[self._sources[key]].append((key, stage))

    def begin(self, kind: str, stage: int, micro_batch: int, interval: Interval) -> None:
        """An action begins."""
        one, device = self._measured[stage], self._devices[stage]
        later = stage in self._has_gradients
        need = one.forward if kind in "FR" else (one.weight if kind == "W" else one.backward)[later]
        if kind == "F" and (stage, micro_batch) in self._recomputed:
            # The first one runs on a copy of its input, see `StageRun`.
            more = one.clones + (0 if stage in self._copied else one.given)
            self._copied.add(stage)
            need = Need(need.most + more, need.mean + more)
        self._needed[device][interval] = need
        self._held[device] = self._of_actions.get(interval.action, _NOTHING)
        self._see(device)

    def end(self, kind: str, stage: int, micro_batch: int, interval: Interval) -> None:
        """An action ends: its results are kept, and what only this action still needed is freed."""
        one, device = self._measured[stage], self._devices[stage]
        del self._needed[device][interval]
        is_last = stage + 1 == len(self._devices)
        shares = not is_last and self._devices[stage + 1] == device
        graph = one.kept_with_output if shares else one.kept
        checkpointed = (stage, micro_batch) in self._recomputed
        if kind == "F":
            self._keep("graph", stage, micro_batch, one.clones if checkpointed else graph)
            if is_last and self._outputs:
                self._keep("output", stage, micro_batch, 2 * self._outputs[micro_batch])
            elif not is_last and (checkpointed or not shares):
                self._keep("input", stage + 1, micro_batch, self._measured[stage + 1].given)
            for key, to_stage in self._skips[stage]:
                size, alone = one.stashed[key]
                in_graph = not checkpointed and self._devices[to_stage] == device  # but for `alone`
                self._keep(("skip", key), to_stage, micro_batch, alone if in_graph else size)
        elif kind == "R":
            self._keep("graph", stage, micro_batch, graph)
        if kind in "BI":
            waits = kind == "I" and one.input_waits > 0
            if waits:
                self._waiting.add((stage, micro_batch))
            self._free(stage, micro_batch, "graph", "gradient", *(() if waits else ("input",)))
            if shares and (stage + 1, micro_batch) in self._waiting:  # the output that the next stage has not copied
                self._keep("input", stage + 1, micro_batch, self._measured[stage + 1].given)
            if stage:
                self._keep("gradient", stage - 1, micro_batch, one.returned)
            for key, (_, gradient) in one.popped.items():
                self._free(stage, micro_batch, ("skip", key))
                self._keep(("skip gradient", key, stage), self._sources[key], micro_batch, gradient)
            self._free(stage, micro_batch, *[("skip gradient", *skip) for skip in self._skips[stage]])
        if kind == "I":
            self._keep("waiting", stage, micro_batch, one.waiting)
        if kind in "BW":
            self._waiting.discard((stage, micro_batch))
            self._free(stage, micro_batch, "waiting", "input")
            if stage not in self._has_gradients:
                self._has_gradients.add(stage)
                self._keep("gradients", stage, 0, one.gradients)
                self._gradients[device] += one.gradients
        for each in {*self._devices}:
            self._see(each)

    def _see(self, device: torch.device) -> None:
        """Counts one of the running actions with the most that it needs, and the others with their average."""
        needs = self._needed[device].values()
        at_once = sum(need.mean for need in needs) + max((need.most - need.mean for need in needs), default=0)
        held = self._held.get(device, _NOTHING)
        total = self._live[device] + at_once + held.weights + held.gradients
        if total > self.peak[device].total:
            self.peak[device] = Peak(total, Held(held.weights, held.gradients + self._gradients[device]))

    def _keep(self, what: Hashable, stage: int, micro_batch: int, size: int) -> None:
        self._free(stage, micro_batch, what)
        self._kept[what, stage, micro_batch] = size
        self._live[self._devices[stage]] += size

    def _free(self, stage: int, micro_batch: int, *what: Hashable) -> None:
        for each in what:
            self._live[self._devices[stage]] -= self._kept.pop((each, stage, micro_batch), 0)
