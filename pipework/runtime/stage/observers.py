"""What watches a stage's computations and actions, and is absent if nobody has asked for it.

`StageRun` puts these functions around the forward and the backward (`_computations`), the ways in and out (`_ways`),
and the handlers (`_watch`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipework.autograd.stray_gradients import refuse_hidden_parameters
from pipework.runtime.stage.layer_errors import refuse_non_finite

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from pipework.autograd.weight_split.store import WeightGradientStore
    from pipework.runtime.random.unseen_draws import Hold
    from pipework.runtime.stage.kept import AnyStructure
    from pipework.runtime.stage.loss import LossRun
    from pipework.runtime.stage.memory_meter import MemoryMeter
    from pipework.runtime.stage.offload import Offload
    from pipework.runtime.stage.stage_backward import Backward, Gradients
    from pipework.runtime.stage.stage_forward import Forward, Look, Outputs
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Handler, Message, Receive, Send
    from pipework.schedule import Action


def deferring(store: WeightGradientStore, run: Forward) -> Forward:
    """The forward of a stage with W: what its layers use of parameters belongs to this micro-batch."""

    def forward(leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> Outputs:
        store.begin(micro_batch)
        result = run(leaves, structure, micro_batch)
        store.end()
        return result

    return forward


def holding(hold: Hold, compute: Callable[..., Any]) -> Callable[..., Any]:
    """A forward or backward while this thread alone draws from the generator of its accelerator."""

    def computed(*given: Any) -> Any:
        with hold:
            return compute(*given)

    return computed


def inspecting(run: StageRun) -> Look:
    """Searches one graph for hidden parameters."""
    stage, situation = run.stage, run.situation

    def look(leaves: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        if situation not in stage.inspected and any(output.requires_grad for output in outputs):
            refuse_hidden_parameters(stage, run.aliases, leaves, outputs)
            stage.inspected.add(situation)

    return look


def finite_gradients(index: int, check_parameters: Callable[[], None], run: Backward) -> Backward:
    """The backward; NaN and infinities among its gradients are errors."""

    def backward(leaves: tuple[Tensor, ...], roots: Any, gradients: Gradients, micro_batch: int) -> Gradients:
        of_leaves = run(leaves, roots, gradients, micro_batch)
        refuse_non_finite(of_leaves, f"the gradient of an input of stage {index}")
        check_parameters()
        return of_leaves

    return backward


def measuring(meter: MemoryMeter, index: int, loss: LossRun | None, run: Forward) -> Forward:
    """The forward; what its graph keeps is counted."""

    def forward(leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> Outputs:
        target = () if loss is None else loss.targets[micro_batch][0]
        with meter.measuring(index, micro_batch, leaves, target):
            return run(leaves, structure, micro_batch)

    return forward


def offloading(offload: Offload, run: Forward) -> Forward:
    """The forward of a stage with O; the tensors that autograd saves can be moved, of the micro-batches that are."""

    def forward(leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> Outputs:
        if micro_batch not in offload.graphs:
            return run(leaves, structure, micro_batch)
        with offload.saving(micro_batch):
            return run(leaves, structure, micro_batch)

    return forward


def counting(meter: MemoryMeter, send: Send) -> Send:
    """Sends outputs, and counts their bytes."""

    def counted(micro_batch: int, message: Message) -> None:
        meter.sending(message[0])
        send(micro_batch, message)

    return counted


def measuring_actions(meter: MemoryMeter, run: StageRun, holds: str | None, *, again: bool) -> Callable[[Action], None]:
    """Called after the actions of a kind: counts what their micro-batch holds now; see `ActionKind.holds`."""

    def observe(action: Action) -> None:
        kind, stage, micro_batch, _ = action
        if kind == "F":
            inputs = run.kept.take_inputs(micro_batch, again=True)
            if inputs is not None:
                meter.checkpointed(stage, micro_batch, [*inputs.leaves, *inputs.buffers.tensors])
        elif kind in ("O", "L"):
            if run.offload is not None:
                meter.moved(stage, micro_batch, run.offload.change_of(action))
        elif holds == "waiting" and not again:
            meter.waiting(stage, micro_batch, () if run.store is None else run.store.kept(micro_batch))
        elif holds == "" and not again:
            meter.released(stage, micro_batch)

    return observe


def marking(mark: Callable[[], None], receive: Receive) -> Receive:
    """Receives, and then says that the action computes from now on."""

    def received(micro_batch: int) -> Message:
        message = receive(micro_batch)
        mark()
        return message

    return received


def after(last: Action, call: Callable[[], None]) -> Handler:
    """A function that is called with one of the actions only."""
    return lambda action: call() if action == last else None
