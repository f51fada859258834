"""Runs training steps of a plan on copies: workers that run at the same time slow each other down.

Stages that were measured alone, one after the other, have been 7 to 19 % faster than in the step, on two CPU workers.
"""

from __future__ import annotations

import copy
import time
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from pipework.assignment.assignment import assign
from pipework.assignment.partition import split_layers
from pipework.backend import LocalBackend
from pipework.executor import Executor, Settings
from pipework.model.checkpoint import AS_SCHEDULED
from pipework.planning.balance.sandbox import now, traceless
from pipework.planning.profiling.step_times import times_scaled
from pipework.runtime.out_of_memory import is_out_of_memory
from pipework.schedule import measure
from pipework.schedule.draw.units import counted
from pipework.timeline import Recording

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from pipework.planning.plan import Plan
    from pipework.planning.profiling.micro_batches import SampleBatch
    from pipework.schedule import Costs

# All plans have two turns, and two more those that are about as fast as the best: twelve steps tell 4 % apart at most.
_TURNS, _TURNS_OF_ALL, _CLOSE = 4, 2, 1.06
# The first step of a turn allocates, and chooses kernels; the second one has been 6 to 13 % slower than those after it.
_WARM_UP = 3
_LEAST_STEPS = 2  # of a turn, that are recorded
_CLEARLY = 0.98  # of the first plan's seconds; less is noise


class Trial:
    """A pipe that trains copies of layers as a plan says, without an optimizer.

    Args:
        plan: for this machine.
        module: its layers, which stay as they are.
        batch: the mini-batch, with a target.
    """

    def __init__(self, plan: Plan, module: nn.Sequential, batch: SampleBatch) -> None:
        self._batch = batch
        self._devices = {torch.device(device) for device in plan.devices}
        layers = copy.deepcopy(module)
        layers.zero_grad(set_to_none=True)
        if not any(layer.training for layer in layers.modules()):
            layers.train()
        assignment = assign(layers, plan.schedule, plan.chunks, plan.balance, plan.devices)
        self._executor = Executor(
            assignment,
            LocalBackend(),
            split_layers(layers, assignment.partitioning),
            range(len(plan.balance)),
            Settings(batch.loss, batch.tuples, plan.chunks, AS_SCHEDULED, warns=False),  # the pipe of the plan will
        )

    def timed_step(self, recording: Recording) -> float:
        """Runs a step, records it, and returns the seconds from its call to its end on all devices."""
        begin = self._now()
        self.step(recording)
        return self._now() - begin

    def _now(self) -> float:
        return max(map(now, self._devices))

    def step(self, recording: Recording | None = None) -> None:
        """Runs a step, and records the times of its actions."""
        self._executor.recording = recording
        self._executor.recorded_step = 0 if recording is None else len(recording.steps)
        with ExitStack() as stack:
            for device in self._devices:
                stack.enter_context(traceless(device))
            self._executor.run(
                self._batch.inputs,
                self._batch.keywords,
                self._batch.target,
                [],
                training=True,
                return_output=False,
                everywhere=False,
            )


def by_speed(
    plans: Sequence[Plan], module: nn.Sequential, batch: SampleBatch, timeout: float, report: Callable[[str], None]
) -> list[tuple[Plan, Costs | None]]:
    """The plans with the fastest steps first, and what their actions take.

    Plans take turns, so that what else runs on the machine slows all of them down. The fastest have more of them.

    Args:
        plans: for this machine; the first one is preferred if others are not clearly faster.
        module: their layers.
        batch: the mini-batch.
        timeout: seconds to measure each stage; there are some steps of each plan at least.
        report: called with a line of text for each plan.

    Returns:
        Plans, and the times of their actions in the median of their steps. If there is no target, or too little memory,
        their steps cannot be tried: then the first plan, and None.
    """
    if batch.target is None:
        return [(plans[0], None)]  # the caller computes the loss, and this does not know how
    no_memory = "no memory for steps of the plan beside the model: its stages are measured one by one"
    copied = sum(each.nbytes for each in (*module.parameters(), *module.buffers()) if each.device.type == "cpu")
    if max(copied, *map(_cpu_bytes, plans)) > _cpu_bytes_left():  # the system ends a program that takes too much
        report(no_memory)
        return [(plans[0], None)]
    steps = [_Steps(plan) for plan in plans]
    report(f"steps of {counted(len(plans), 'plan')} are tried")
    for turn in range(_TURNS):
        best = min((each.median for each in steps if not each.failed), default=inf)
        for each in steps:
            if each.failed or (turn >= _TURNS_OF_ALL and each.median > _CLOSE * best):
                continue
            try:
                each.add(Trial(each.plan, module, batch), timeout * len(each.plan.balance) / _TURNS)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                each.failed = True
    tried = [each for each in steps if not each.failed]
    if not tried:
        report(no_memory)
        return [(plans[0], None)]
    for each in tried:
        name = f"{each.plan.schedule.name}, {counted(each.plan.chunks, 'micro-batch')}"
        report(f"{name}: {each.median:.3g} s, median of {counted(len(each.seconds), 'step')}")
    tried.sort(key=lambda each: each.median * (_CLEARLY if each is steps[0] else 1))
    return [(each.plan, each.costs()) for each in tried]


class _Steps:
    """Recorded steps of a plan.

    Attributes:
        plan: whose steps.
        seconds: how long each of them took, from its call to its end on all devices.
        failed: whether there was too little memory for one of them.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._recording = Recording(memory=False)
        self.seconds: list[float] = []
        self.failed = False

    @property
    def median(self) -> float:
        """Of the seconds; infinity if there are none."""
        return median(self.seconds) if self.seconds else inf

    def add(self, trial: Trial, seconds: float) -> None:
        """Records steps for some seconds, and a few at least."""
        begin = time.perf_counter()
        for number in range(_WARM_UP):
            if number == 0 or time.perf_counter() < begin + seconds:
                trial.step()
        end, wanted = time.perf_counter() + seconds, len(self.seconds) + _LEAST_STEPS
        while len(self.seconds) < wanted or time.perf_counter() < end:
            self.seconds.append(trial.timed_step(self._recording))

    def costs(self) -> Costs:
        """What actions take, so that the simulated step takes as long as the median of these.

        The medians of actions alone give less, by 3 to 8 % with operators of some microseconds: if one action takes
        longer than its median, others wait for it; and a step begins before its first action, and ends after its last.
        """
        costs = replace(self._recording.costs(), skip_transfer=self.plan.costs.skip_transfer)
        simulated = measure(self.plan.schedule, costs).makespan
        return times_scaled(costs, self.median / simulated) if simulated else costs


def _cpu_bytes(plan: Plan) -> float:
    places = map(torch.device, plan.devices)
    return sum(held.total for held, place in zip(plan.workers, places, strict=True) if place.type == "cpu")


def _cpu_bytes_left() -> float:
    """What the system says that programs can still get; infinity if it says nothing."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return inf
    return next((1024.0 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")), inf)
