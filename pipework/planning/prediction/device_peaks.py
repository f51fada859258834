"""The most that each device holds during a step, from a simulated timeline and what each action needs."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from pipework.planning.prediction.stage_copy import Need

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    import torch

    from pipework.planning.prediction.stage_copy import ActionBytes
    from pipework.schedule import Action, Interval, Timeline


class Held(NamedTuple):
    """Bytes of weights and of gradients."""

    weights: int
    gradients: int


class Peak(NamedTuple):
    """The most that a device holds at one moment.

    Attributes:
        total: bytes, without what is there before the step.
        held: how much of it is what `device_peaks` was given as held, and gradients.
    """

    total: int
    held: Held


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
    steps = _Steps(measured, devices, timeline.intervals, outputs, held or {})
    moments: list[tuple[float, int, Interval]] = []
    for interval in timeline.intervals:
        moments.append((interval.start, 1, interval))
        # An action ends before the next one begins, but not before it has begun itself.
        moments.append((interval.end, 0 if interval.end > interval.start else 2, interval))
    for _, phase, interval in sorted(moments, key=lambda moment: moment[:2]):
        if phase == 1:
            steps.begin(interval)
        else:
            steps.end(interval)
    return dict(steps.peak)


class _Steps:
    """The memory of the devices while the timeline passes."""

    def __init__(
        self,
        measured: Sequence[ActionBytes],
        devices: Sequence[torch.device],
        intervals: Sequence[Interval],
        outputs: Sequence[int],
        held: Mapping[Action, Held],
    ) -> None:
        self._of_actions = held
        self._held: dict[torch.device, Held] = defaultdict(lambda: Held(0, 0))
        self._measured = measured
        self._devices = devices
        self._outputs = outputs
        self._recomputed = {each.action[1:3] for each in intervals if each.action.kind == "R"}
        self._live: dict[torch.device, int] = defaultdict(int)
        self._gradients: dict[torch.device, int] = defaultdict(int)
        self.peak: dict[torch.device, Peak] = defaultdict(lambda: Peak(0, Held(0, 0)))
        self._needed: dict[torch.device, dict[Interval, Need]] = defaultdict(dict)  # by the actions that run now
        self._kept: dict[tuple[Hashable, int, int], tuple[torch.device, int]] = {}
        self._has_gradients: set[int] = set()
        self._copied: set[int] = set()
        self._waiting: set[tuple[int, int]] = set()  # whose W needs the input
        # For each stage that stashes, the skip and the stage that pops it, the lowest one of each device: that goes
        # backward last, and the others of the device pop the same tensor.
        self._skips: dict[int, list[tuple[Hashable, int]]] = defaultdict(list)
        self._sources: dict[Hashable, int] = {key: stage for stage, one in enumerate(measured) for key in one.stashed}
        seen = set()
        for stage, one in enumerate(measured):
            for key in one.popped:
                if (key, devices[stage]) not in seen:
                    seen.add((key, devices[stage]))
                    self._skips[self._sources[key]].append((key, stage))

    def begin(self, interval: Interval) -> None:
        """An action begins."""
        kind, stage, micro_batch, _ = interval.action
        bytes_of, device = self._measured[stage], self._devices[stage]
        later = stage in self._has_gradients
        need = bytes_of.forward if kind in "FR" else (bytes_of.weight if kind == "W" else bytes_of.backward)[later]
        if kind == "F" and (stage, micro_batch) in self._recomputed:
            more = bytes_of.clones
            if stage not in self._copied:  # the first one runs on a copy of its input, see `StageRun`
                more += bytes_of.given
                self._copied.add(stage)
            need = Need(need.most + more, need.mean + more)
        self._needed[device][interval] = need
        self._held[device] = self._of_actions.get(interval.action, Held(0, 0))
        self._see(device)

    def end(self, interval: Interval) -> None:
        """It ends: what it leaves behind is kept, and what it was the last to need is freed."""
        kind, stage, micro_batch, _ = interval.action
        bytes_of, device = self._measured[stage], self._devices[stage]
        del self._needed[device][interval]
        shares = stage + 1 < len(self._devices) and self._devices[stage + 1] == device
        graph = bytes_of.kept_with_output if shares else bytes_of.kept
        checkpointed = (stage, micro_batch) in self._recomputed
        if kind == "F":
            self._keep("graph", stage, micro_batch, device, bytes_of.clones if checkpointed else graph)
            if stage + 1 < len(self._devices) and (checkpointed or not shares):
                to = self._devices[stage + 1]
                self._keep("input", stage + 1, micro_batch, to, self._measured[stage + 1].given)
            elif stage + 1 == len(self._devices) and self._outputs:
                self._keep("output", stage, micro_batch, device, 2 * self._outputs[micro_batch])
            for key, to_stage in self._skips[stage]:
                size, alone = bytes_of.stashed[key]
                held = not checkpointed and self._devices[to_stage] == device  # by the graph, but for `alone`
                self._keep(("skip", key), to_stage, micro_batch, self._devices[to_stage], alone if held else size)
        elif kind == "R":
            self._keep("graph", stage, micro_batch, device, graph)
        if kind in "BI":
            waits = kind == "I" and bytes_of.waits_for_input
            if waits:
                self._waiting.add((stage, micro_batch))
            for what in ("graph", "gradient") if waits else ("graph", "gradient", "input"):
                self._free(what, stage, micro_batch)
            if shares and (stage + 1, micro_batch) in self._waiting:  # the output that the next stage has not copied
                self._keep("input", stage + 1, micro_batch, device, self._measured[stage + 1].given)
            if stage:
                self._keep("gradient", stage - 1, micro_batch, self._devices[stage - 1], bytes_of.returned)
            for key, size in bytes_of.popped.items():
                self._free(("skip", key), stage, micro_batch)
                source = self._sources[key]
                self._keep(("skip gradient", key, stage), source, micro_batch, self._devices[source], size)
            for key, from_stage in self._skips[stage]:
                self._free(("skip gradient", key, from_stage), stage, micro_batch)
        if kind == "I":
            self._keep("waiting", stage, micro_batch, device, bytes_of.waiting)
        if kind in "BW":
            self._waiting.discard((stage, micro_batch))
            for what in ("waiting", "input"):
                self._free(what, stage, micro_batch)
            if stage not in self._has_gradients:
                self._has_gradients.add(stage)
                self._keep("gradients", stage, 0, device, bytes_of.gradients)
                self._gradients[device] += bytes_of.gradients
        for each in {*self._devices}:
            self._see(each)

    def _see(self, device: torch.device) -> None:
        """One of the actions that run now needs most, and the others what they need on average."""
        needs = self._needed[device].values()
        at_once = sum(need.mean for need in needs) + max((need.most - need.mean for need in needs), default=0)
        held = self._held[device]
        total = self._live[device] + at_once + held.weights + held.gradients
        if total > self.peak[device].total:
            self.peak[device] = Peak(total, Held(held.weights, held.gradients + self._gradients[device]))

    def _keep(self, what: Hashable, stage: int, micro_batch: int, device: torch.device, size: int) -> None:
        self._free(what, stage, micro_batch)
        self._kept[what, stage, micro_batch] = device, size
        self._live[device] += size

    def _free(self, what: Hashable, stage: int, micro_batch: int) -> None:
        device, size = self._kept.pop((what, stage, micro_batch), (None, 0))
        if device is not None:
            self._live[device] -= size
