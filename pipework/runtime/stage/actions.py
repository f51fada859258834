"""What a stage does in each kind of action: one handler for each, and the table of them.

    F  1 receive -> leaves -> 2 layers -> outputs -> 4 cut from the graph -> 5 send     3 keep leaves and graph roots
    R  1 leaves -> 2 layers again                                                       3 now keep graph roots, too
    B  I, then W if gradients are deferred
    I  1 receive gradients -> 2 take the graph -> 3 autograd -> leaves -> 4 send        keep what W needs
    W  1 the gradients of parameters that I has deferred                                keep nothing
    O  what is kept goes to host memory, and L brings it back (see `offload`)

A further kind is a handler, a row in `HANDLERS`, and a row in the table of `schedule.kinds`. What watches
an action is not here: `StageRun._watch` puts it around, if anybody has asked for it (see `observers`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pipework.runtime.stage.recomputation import in_phase

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipework.autograd.aliases import SharedMemory
    from pipework.runtime.stage.stage_backward import Backward
    from pipework.runtime.stage.stage_forward import Forward
    from pipework.runtime.stage.stage_run import StageRun
    from pipework.runtime.transport import Handler, Receive, Send
    from pipework.schedule import Action


@dataclass(eq=False, slots=True)
class StageActions:
    """What the actions of a stage work with, in one run of its worker; `StageRun.connect` fills it in.

    Attributes:
        run: the mini-batch.
        run_forward: the stage's forward; see `StageForward`.
        run_backward: the stage's backward; see `StageBackward`.
        receive: gives the input of a micro-batch.
        send: takes the outputs of a micro-batch.
        receive_gradients: gives the gradients of the outputs.
        send_gradients: takes the gradients of the input; None: nobody wants them.
        memory: of the gradients of parameters.
        again: whether the backward may run once more (`retain_graph`).
    """

    run: StageRun
    run_forward: Forward
    run_backward: Backward
    receive: Receive
    send: Send
    receive_gradients: Receive
    send_gradients: Send | None
    memory: SharedMemory
    again: bool

    def forward(self, action: Action) -> None:
        """F: computes the stage's output for one micro-batch and sends it on."""
        run, micro_batch = self.run, action[2]
        leaves, structure = self.receive(micro_batch)  # 1
        if micro_batch in run.checkpointed:
            first = run.recomputation.begin(run, leaves, structure, micro_batch)
            with in_phase("checkpointing"):
                outputs, structure = self.run_forward(first.leaves, structure, micro_batch)  # 2
            run.recomputation.end(run, first, outputs, structure, micro_batch)  # 3: the leaves alone
        else:
            outputs, structure = self.run_forward(leaves, structure, micro_batch)  # 2
            if run.trains:
                run.kept.put(micro_batch, leaves, outputs, structure)  # 3
        outputs = run.in_place.cut(outputs)  # 4: this frame must not keep the graph, either
        self.send(micro_batch, (outputs, structure))  # 5

    def recompute(self, action: Action) -> None:
        """R: computes a checkpointed micro-batch again and keeps the graph. Needs no gradient: it may run early."""
        self.run.recomputation.second_pass(self, action[2])  # 1, 2, 3

    def backward_of_input(self, action: Action) -> None:
        """I, and B: differentiates one micro-batch, and sends the gradient of its input.

        With a store the gradients of parameters are deferred to W where possible. Without one this is the whole of B.
        """
        micro_batch = action[2]
        gradients, _ = self.receive_gradients(micro_batch)  # 1
        leaves, roots = self.run.kept.take(micro_batch, again=self.again)  # 2
        of_leaves = self.run_backward(leaves, roots, gradients, micro_batch)  # 3
        if self.send_gradients is not None:
            self.send_gradients(micro_batch, (of_leaves, None))  # 4

    def backward_of_weights(self, action: Action) -> None:
        """W, and the end of B: computes the deferred gradients, and adds them to those of the parameters."""
        store = self.run.store
        assert store is not None
        store.add_weight_gradients(action[2], again=self.again)  # 1
        if self.memory.pending:
            self.memory.separate()

    def offload(self, action: Action) -> None:
        """O: what the micro-batch holds goes to host memory, if it holds anything for a backward."""
        if self.run.offload is not None:
            self.run.offload.store(action)

    def reload(self, action: Action) -> None:
        """L: it comes back."""
        if self.run.offload is not None:
            self.run.offload.fetch(action)


HANDLERS: Final[Mapping[str, Sequence[Callable[[StageActions, Action], None]]]] = MappingProxyType(
    {
        "F": (StageActions.forward,),
        "R": (StageActions.recompute,),
        "B": (StageActions.backward_of_input, StageActions.backward_of_weights),
        "I": (StageActions.backward_of_input,),
        "W": (StageActions.backward_of_weights,),
        "O": (StageActions.offload,),
        "L": (StageActions.reload,),
    }
)
"""By the letter of a kind, the parts of its actions, one after the other. Only the first part of an action receives."""


def chained(*calls: Handler) -> Handler:
    """A handler and what watches it as one handler: one call after the other."""

    def handle(action: Action) -> None:
        for call in calls:
            call(action)

    return handle
