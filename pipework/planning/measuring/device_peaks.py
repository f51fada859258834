"""The most that each device holds during a step, from a simulated timeline and what each action needs."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipework.planning.measuring.stage_copy import Need
from pipework.schedule.edges import awaited

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import torch

    from pipework.planning.measuring.stage_copy import ActionBytes
    from pipework.schedule import Interval, Timeline
    from pipework.schedule.action import Action


def device_peaks(
    timeline: Timeline,
    measured: Sequence[ActionBytes],
    devices: Sequence[torch.device],
    outputs: Sequence[int] = (),
    static_targets: Sequence[int] | None = None,
    orders: Sequence[Sequence[Action]] = (),
) -> dict[torch.device, int]:
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
        static_targets: for a step of graphs, which copy inputs and targets to static tensors in the order of the
            schedule: the bytes of each micro-batch's target. None: there are no graphs.
        orders: of the workers, if they have copies to the host, which are at their places between computations.

    Returns:
        The bytes of each device at its peak, without what is there before the step.
    """
    memory = _Memory(timeline, measured, devices, outputs, static_targets, orders)
    moments: list[tuple[float, int, Interval]] = []
    for interval in timeline.intervals:
        moments.append((interval.start, 1, interval))
        # An action ends before the next one begins, but not before it has begun itself.
        moments.append((interval.end, 0 if interval.end > interval.start else 2, interval))
    for _, phase, interval in sorted(moments, key=lambda moment: moment[:2]):
        (memory.begin if phase == 1 else memory.end)(*interval.action[:3], interval)
    return dict(memory.peak)


@dataclass
class _Memory:
    """The memory of the devices while the timeline passes; its arguments are those of `device_peaks`.

    Attributes:
        peak: of each device, so far.
    """

    timeline: Timeline
    measured: Sequence[ActionBytes]
    devices: Sequence[torch.device]
    outputs: Sequence[int]
    static_targets: Sequence[int] | None
    orders: Sequence[Sequence[Action]]

    def __post_init__(self) -> None:
        self._table = self.timeline.table
        again = {kind for kind, row in self._table.items() if row.leaves}
        self._recomputed = {each.action[1:3] for each in self.timeline.intervals if each.action.kind in again}
        self._kept: dict[tuple[Hashable, int, int], int] = {}  # by what it is, stage and micro-batch
        self._live: dict[torch.device, int] = defaultdict(int)  # the sum of that
        self._needed: dict[torch.device, dict[Interval, Need]] = defaultdict(dict)  # by the actions that run now
        self._copied: set[int] = set()
        # After each computation, the micro-batches whose O has ended then, and those that an L brings back.
        self._copies: dict[Action, list[tuple[bool, int, int]]] = defaultdict(list)
        for order in self.orders:
            ended = awaited(order, self._table)
            for position, action in enumerate(order):
                if self._table[action.kind].scope == "micro-batch":
                    before = action
                if position in ended:
                    self._copies[before].append((False, *order[ended[position]][1:3]))
                if self._table[action.kind].scope == "copy" and self._table[action.kind].phase != "forward":
                    self._copies[before].append((True, *action[1:3]))
        self.peak: dict[torch.device, int] = defaultdict(int)
        # For each stage that stashes, the skip and the stage that pops it, the lowest one of each device: that goes
        # backward last, and the others of the device pop the same tensor.
        self._sources = {key: stage for stage, one in enumerate(self.measured) for key in one.stashed}
        self._skips: dict[int, list[tuple[Hashable, int]]] = defaultdict(list)
        seen: set[tuple[Hashable, torch.device]] = set()
        for stage, one in enumerate(self.measured):
            for key in one.popped:
                if (key, self.devices[stage]) not in seen:
                    self._skips[self._sources[key]].append((key, stage))
                    seen.add((key, self.devices[stage]))

    def begin(self, kind: str, stage: int, micro_batch: int, interval: Interval) -> None:
        """An action begins."""
        one = self.measured[stage]
        later = ("gradients", stage, 0) in self._kept
        row = self._table[kind]
        need = Need(0, 0)
        if row.adds:
            need = (one.backward if row.reads else one.weight)[later]
        elif row.reads:
            need = one.forward
        if row.gives == "F" and (stage, micro_batch) in self._recomputed:
            # The first one runs on a copy of its input, see `StageRun`.
            more = one.clones + (0 if stage in self._copied else one.given)
            self._copied.add(stage)
            need = Need(need.most + more, need.mean + more)
        if row.gives == "F" and (sizes := self.static_targets) is not None:
            if stage == 0:
                self._keep("static input", stage, micro_batch, one.given)
            if stage + 1 == len(self.devices):
                self._keep("static target", stage, micro_batch, sizes[micro_batch])
        self._needed[self.devices[stage]][interval] = need
        self._see()

    def end(self, kind: str, stage: int, micro_batch: int, interval: Interval) -> None:
        """An action ends: its results are kept, and what only this action still needed is freed."""
        one, device = self.measured[stage], self.devices[stage]
        del self._needed[device][interval]
        is_last, shares = stage + 1 == len(self.devices), self._shares(stage)
        graph = one.graph(shares=shares)
        checkpointed = (stage, micro_batch) in self._recomputed
        row = self._table[kind]
        sizes = {"activation": graph, "checkpoint_activation": one.clones, "waiting": one.waiting}
        holds = "checkpoint_activation" if checkpointed and row.gives == "F" else row.holds
        if holds is not None:
            self._keep("graph", stage, micro_batch, sizes.get(holds, 0))
        if row.gives == "F":
            if is_last and self.outputs:
                self._keep("output", stage, micro_batch, 2 * self.outputs[micro_batch])
            elif not is_last and (checkpointed or not shares):
                self._keep("input", stage + 1, micro_batch, self.measured[stage + 1].given)
            for key, to_stage in self._skips[stage]:
                size, alone = one.stashed[key]
                in_graph = not checkpointed and self.devices[to_stage] == device  # but for `alone`
                self._keep(("skip", key), to_stage, micro_batch, alone if in_graph else size)
        if row.gives == "B":
            waits = row.holds == "waiting" and one.input_waits > 0
            self._free(stage, micro_batch, "gradient", *(() if waits else ("input",)))
            if shares and ("input waits", stage + 1, micro_batch) in self._kept:  # the output, which was not copied
                self._keep("input", stage + 1, micro_batch, self.measured[stage + 1].given)
            if waits:
                self._keep("input waits", stage, micro_batch, 0)
            if stage:
                self._keep("gradient", stage - 1, micro_batch, one.returned)
            for key, (_, gradient) in one.popped.items():
                self._free(stage, micro_batch, ("skip", key))
                self._keep(("skip gradient", key, stage), self._sources[key], micro_batch, gradient)
            self._free(stage, micro_batch, *[("skip gradient", *skip) for skip in self._skips[stage]])
        if row.holds == "":
            self._free(stage, micro_batch, "input", "input waits", "static input", "static target")
            self._keep("gradients", stage, 0, one.gradients)
        self._see()
        for is_back, *where in self._copies[interval.action]:
            self._copy(*where, is_back=is_back)

    def _shares(self, stage: int) -> bool:
        return stage + 1 < len(self.devices) and self.devices[stage + 1] == self.devices[stage]

    def _copy(self, stage: int, micro_batch: int, *, is_back: bool) -> None:
        """What a graph holds is on the host, or back on the device; of a recomputed micro-batch, its input."""
        one, shares = self.measured[stage], self._shares(stage)
        moved = 0 if is_back else sum(one.memories(shares=shares))
        sizes: dict[Hashable, int] = {"graph": one.graph(shares=shares) - moved}
        if (stage, micro_batch) in self._recomputed:
            sizes = {"input": one.given, **{("skip", key): size for key, (size, _) in one.popped.items()}}
            sizes = sizes if is_back else dict.fromkeys(sizes, 0)
        for what, size in sizes.items():
            if (what, stage, micro_batch) in self._kept:  # else another stage holds it, or the caller
                self._keep(what, stage, micro_batch, size)
        self._see()

    def _see(self) -> None:
        """Counts one of the running actions with the most that it needs, and the others with their average."""
        for device in {*self.devices}:
            needs = self._needed[device].values()
            at_once = sum(need.mean for need in needs) + max((need.most - need.mean for need in needs), default=0)
            self.peak[device] = max(self.peak[device], self._live[device] + at_once)

    def _keep(self, what: Hashable, stage: int, micro_batch: int, size: int) -> None:
        self._free(stage, micro_batch, what)
        self._kept[what, stage, micro_batch] = size
        self._live[self.devices[stage]] += size

    def _free(self, stage: int, micro_batch: int, *what: Hashable) -> None:
        for each in what:
            self._live[self.devices[stage]] -= self._kept.pop((each, stage, micro_batch), 0)
