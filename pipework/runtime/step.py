"""A step: one mini-batch, which the workers run in the order of its schedule, in one run or in two.

    loss inside     run       F and B together: losses, and the gradients of all parameters
    loss outside    run       F alone: outputs, from which the caller computes the loss
                    backward  B, from the gradients of the outputs, when autograd comes back to the pipe
    no gradients    run       F alone

Each of these runs is a `PipeRun`.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, Any

import torch

from pipework import torch_private
from pipework.autograd.tied_gradients import tied_gradients
from pipework.runtime.random import kernels
from pipework.runtime.random.shards import install_for_dtensors
from pipework.runtime.random.unseen_draws import generators_given_up
from pipework.runtime.run import PipeRun
from pipework.runtime.run_spec import RunSpec
from pipework.runtime.stage.memory_meter import MemoryMeter
from pipework.runtime.stage.stage_run import StageRun

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from pipework.runtime.engine import Engine
    from pipework.runtime.program import Program
    from pipework.runtime.run_spec import StepSpec
    from pipework.runtime.transport import Message


class Step:
    """A mini-batch on the stages of this process.

    Args:
        engine: the pipe's stages and workers.
        program: the schedule.
        spec: what is asked of the mini-batch.

    Attributes:
        complete: see `StepSpec`.
    """

    def __init__(self, engine: Engine, program: Program, spec: StepSpec) -> None:
        self._engine = engine
        self._program = program
        self._spec = spec
        self.complete = spec.complete
        # Autograd runs a backward of outputs on an accelerator on a thread of its own, where the caller's variables are
        # not set. Those of the call are kept until then, and only there: one may hold the loss, and so this step.
        late = spec.loss is None and bool(engine.accelerators)
        self._variables = contextvars.copy_context() if late else None
        self._failed = False
        self._gradients: dict[int, list[Tensor | None]] | None = None
        engine.workers.refuse_caller()
        if spec.captured is not None and spec.captured.replayed:
            self._runs = spec.captured.replayed
            spec.captured.restore_gradients()
            return
        with engine.lock:  # while workers run for another thread, the slots hold what is theirs
            self._runs = {index: StageRun(stage, program, spec) for index, stage in engine.stages.items()}
            for run in self._runs.values():
                engine.refuse_collectives(run.aliases.dtensor, run.sharded)
            ties = tied_gradients({number: run.aliases for number, run in self._runs.items()}, engine.link)
            capture = None if spec.captured is None else spec.captured.begin(spec.key)
            if capture is not None or (spec.recorder is not None and spec.recorder.memory):
                self._count_memory()
        for number, tied in ties.items():
            self._runs[number].tied = tied
        for run in self._runs.values():
            run.capture = capture
        if any(run.draws for run in self._runs.values()):
            kernels.install(each.device for each in engine.accelerators)
            install_for_dtensors()

    def _count_memory(self) -> None:
        """Gives each worker's stages a meter."""
        for worker in self._engine.devices:
            indices = [index for index in self._runs if self._engine.placement[index] == worker]
            modules = [module for index in indices for module in self._engine.stages[index].modules]
            tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
            # The weights that a stage computes with are not those of its modules, if FSDP shards these.
            persistent = [*tensors, *(leaf for index in indices for leaf in self._runs[index].aliases.leaves)]
            host = self._engine.devices[worker].host_memory if any(self._runs[n].offload for n in indices) else None
            meter = MemoryMeter(persistent, host)
            for index in indices:
                self._runs[index].meter = meter

    @property
    def stages(self) -> list[int]:
        """Those of this process, in order."""
        return list(self._runs)

    def parameters(self, stage: int) -> list[Tensor]:
        """The parameters of a stage that require a gradient."""
        return self._runs[stage].aliases.parameters

    def run(self, inputs: Sequence[Message], targets: Sequence[Message]) -> tuple[list[Message], list[Message]]:
        """Runs the forwards; with the loss inside, and gradients wanted, the whole schedule.

        Args:
            inputs: for each micro-batch, what stage 0 gets.
            targets: for each micro-batch, what the loss compares the output with; empty: the loss is outside, or
                another process has them.

        Returns:
            For each micro-batch, the output of the last stage, or with the loss inside its part of the loss (and the
            output, if the loss keeps it and it is here or wanted everywhere). And the gradient of each tensor that
            stage 0 was given. Either is empty if it is not computed, or is in another process and not wanted here.
        """
        sent: dict[tuple[str, int], Sequence[Message]] = {("F", 0): inputs}
        if self._spec.loss is None:
            return self._run(sent, forward=True, differentiates=False)
        sent["target", len(self._engine.placement) - 1] = targets
        results = self._run(sent, forward=True, differentiates=self._spec.context.grad)
        if (captured := self._spec.captured) is not None:
            captured.end(self._runs)
            # The next step overwrites what its graphs have left.
            self._gradients = {stage: _copies(run.aliases.gradients()) for stage, run in self._runs.items()}
            for device in self._engine.accelerators:
                device.wait_for_caller()  # the next step may be called from another stream
        return results

    def backward(self, gradients: Sequence[tuple[Tensor | None, ...]], *, retain_graph: bool) -> list[Message]:
        """Runs everything after the forwards.

        Args:
            gradients: for each micro-batch, the gradient of each tensor that the last stage gave.
            retain_graph: whether this may be called again.

        Returns:
            For each micro-batch, the gradient of each tensor that stage 0 was given; an empty list if no input requires
            a gradient, or this process does not want the gradients.
        """
        if self._failed:
            raise RuntimeError(
                "the backward of this mini-batch has failed before, so its graphs are gone; "
                "call the pipe again for a new one"
            )
        self._spec.versions.spread()
        for run in self._runs.values():
            run.aliases.take_gradients()  # a backward that wanted some parameters only left the others' gradients lying
        sent = {("B", len(self._engine.placement) - 1): [(tensors, None) for tensors in gradients]}
        with generators_given_up(), self._engine.backend.calling("backward"):
            self._engine.workers.refuse_caller()
            return self._run(sent, forward=False, differentiates=True, retain_graph=retain_graph)[1]

    def take_gradients(self, stage: int, *, keep: bool = False) -> list[Tensor | None]:
        """The gradients of `parameters(stage)`; the caller's current stream may use them.

        Args:
            stage: which.
            keep: leave them here, too.
        """
        if self._gradients is None:
            aliases = self._runs[stage].aliases
            gradients = aliases.gradients() if keep else aliases.take_gradients()
        else:
            gradients = self._gradients[stage] if keep else self._gradients.pop(stage)
        self._engine.stages[stage].device.hand_over(gradients)
        return gradients

    def _run(
        self,
        sent: Mapping[tuple[str, int], Sequence[Any]],
        *,
        forward: bool,
        differentiates: bool,
        retain_graph: bool = False,
    ) -> tuple[list[Message], list[Message]]:
        """Runs the workers once; see `PipeRun`."""
        versions = self._spec.versions
        modes = torch_private.modes()
        spec = RunSpec(
            self._spec, self._engine, self._program, self._runs, modes, forward, differentiates, retain_graph
        )
        run = PipeRun(spec)
        run.execute(sent, contextvars.copy_context() if forward or self._variables is None else self._variables)
        if forward:
            versions.report()
        if (differentiates or self._spec.loss is not None) and not retain_graph:
            versions.forget()
            self._variables = None
        if run.failure.happened:
            self._failed = True
            for each in self._runs.values():
                each.clear()
            if self._spec.captured is not None:
                self._spec.captured.capture = None
            run.failure.raise_first()
        return run.collect()


def _copies(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    copies = [None if each is None else torch.empty_like(each) for each in gradients]
    if any(each is not None for each in gradients):
        torch_private.copy_each(*([each for each in every if each is not None] for every in (copies, gradients)))
    return copies
