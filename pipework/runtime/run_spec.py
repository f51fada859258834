"""The records of a mini-batch and of a run: what is asked of the workers, said once and passed whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from pipework.autograd.batch_versions import BatchVersions
    from pipework.runtime.caller_context import CallerContext
    from pipework.runtime.engine import Engine
    from pipework.runtime.graphs.captured_step import CapturedStep
    from pipework.runtime.program import Program
    from pipework.runtime.random.streams import Key
    from pipework.runtime.stage.loss import InnerLoss
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.schedule import Action
    from pipework.schedule.schedule import Orders
    from pipework.timeline import Recording


class StepSpec(NamedTuple):
    """What is asked of a mini-batch.

    Attributes:
        context: the settings of the calling thread, such as autocast.
        key: selects the random numbers.
        versions: of the caller's input tensors.
        loss: computed by the last stage; None: the loss is outside.
        own_leaves: which of the caller's input tensors are leaves that require a gradient; they refuse in-place
            operations.
        input_gradients: whether any input tensor requires a gradient, in the process that reads the inputs.
        takes_gradients: whether this process wants these gradients; they are there for all.
        everywhere: whether every process gets the outputs, not only that of the last stage.
        check_finite: whether NaN and infinities are errors.
        recorder: receives the actions; None: nothing is recorded.
        number: of this mini-batch, for the recorder.
        scaler: looks for infinities among gradients; None: there is no scaler.
        captured: its actions are captured as graphs, or were and are replayed; None: they run as they are.
        one_thread: whether one thread executes all actions in any case, as before graphs are captured: code is compiled
            by one thread then.
        complete: called after the last action of each stage in a backward, when its gradients are complete; None: they
            are of no interest before the end.
    """

    context: CallerContext
    key: Key
    versions: BatchVersions
    loss: InnerLoss | None = None
    own_leaves: frozenset[int] = frozenset()
    input_gradients: bool = True
    takes_gradients: bool = True
    everywhere: bool = False
    check_finite: bool = False
    recorder: Recording | None = None
    number: int = 0
    scaler: torch.amp.GradScaler | None = None
    captured: CapturedStep | None = None
    one_thread: bool = False
    complete: Callable[[StageRun], None] | None = None


class RunSpec(NamedTuple):
    """One run of the workers: a forward, a backward, or a whole training step.

    Attributes:
        step: the mini-batch.
        engine: the stages and workers.
        program: the schedule.
        runs: the stages of this process, by number.
        modes: of the calling thread, see `torch_private.modes`.
        forward: whether layers go forward, so that this is the mini-batch's first run.
        differentiates: whether they go backward, so that gradients are complete afterwards.
        retain_graph: whether the graphs are needed once more.
    """

    step: StepSpec
    engine: Engine
    program: Program
    runs: Mapping[int, StageRun]
    modes: Sequence[Any]
    forward: bool
    differentiates: bool
    retain_graph: bool

    @property
    def orders(self) -> Orders:
        """The actions of each worker."""
        if not self.differentiates:
            return self.program.forwards
        return self.program.whole if self.forward else self.program.others

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage."""
        return self.engine.placement

    @property
    def micro_batches(self) -> int:
        """Their number."""
        return self.program.schedule.micro_batches

    @property
    def one_thread(self) -> bool:
        """Whether one thread executes the actions of all workers of this process: the one place that decides.

        There is a single worker, or the pipe was made so (`debug="one_thread"`, `graphs=`), or the caller has a mode.
        """
        single = len(self.engine.devices) == 1
        return single or self.engine.one_thread or self.step.one_thread or bool(self.modes)

    @property
    def input_gradients(self) -> bool:
        """Whether every process gets the gradients of what stage 0 was given."""
        return self.differentiates and self.step.input_gradients

    @property
    def shared_results(self) -> int | None:
        """How many tensors of each micro-batch's result every process gets: 0, or 1 (the loss); None: all."""
        if not self.forward:
            return 0
        if self.step.everywhere:
            return None
        return 0 if self.step.loss is None else 1

    def last_action(self, stage: int) -> Action | None:
        """What completes the gradients of a stage; None: they come later, from replicas, or there may be more."""
        own = [action for action in self.orders[self.placement[stage]] if action.stage == stage]
        if self.retain_graph or not self.differentiates or any(action.kind == "REDUCE_GRAD" for action in own):
            return None
        return next(action for action in reversed(own) if action.computes)

    def of_worker(self, worker: int) -> dict[int, StageRun]:
        """The stages of a worker."""
        placement = self.engine.placement
        return {stage: run for stage, run in self.runs.items() if placement[stage] == worker}
