"""The nodes of a mini-batch in the user's autograd graph: one per stage, chained by tokens.

    inputs, params of stage 0    params of stage 1            params of the last stage
              |                        |                                |
         [StageNode 0] --token--> [StageNode 1] --token--> ... [StageNode last] --> outputs

The user's backward reaches the last node first. If the loss is outside, it sends the outputs' gradients through the
workers, which fill every stage's gradient buffers; if the loss is inside, they were filled when the loss was computed.
Then each node in turn hands its stage's buffers to autograd. So a parameter's hooks fire once, with the whole gradient,
and the last stage's gradients are there for a reducer (DistributedDataParallel) before the first's.

If the workers are processes, each has the nodes of its own stages. The inputs that it was given go into the first of
these, whichever stage that is: all processes get the gradients of the inputs, for what comes before the pipe.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor

from pipework import torch_private
from pipework.autograd.factor import Factor
from pipework.tracebacks import ShortTracebacks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.runtime.step import Step
    from pipework.runtime.transport import Message

_NO_TOKEN: Final = torch.zeros((), dtype=torch.float64, device="cpu")
"""Before the first node, unless it is rooted."""

_LARGE: Final = 128.0
"""A scaler begins with 65536; the weight of a loss is hardly ever so large."""

FREED: Final = (
    "pipework: this mini-batch has gone backward before. Call the pipe again for a new loss, or the first backward "
    "with retain_graph=True; for several losses of one call add them up and go backward once"
)
"""A note on PyTorch's error for a second backward, which does not say what was called twice."""


@dataclass
class LossOutside:
    """The workers go backward when the user's backward begins.

    Attributes:
        step: the mini-batch.
        cut: splits the gradients of the outputs into those of each micro-batch.
        join: joins the input gradients of stage 0 into those of the pipe's input tensors here.
        returned: the input gradients of stage 0, between the last node's backward and the first one's.
    """

    step: Step
    cut: Callable[[Sequence[Tensor | None]], list[tuple[Tensor | None, ...]]]
    join: Callable[[Sequence[Message]], list[Tensor | None]]
    returned: list[Message] = field(default_factory=list)

    def begin(self, gradients: Sequence[Tensor | None], *, retain_graph: bool) -> Factor | None:
        """Called by the last node: runs everything that computes the gradients.

        Args:
            gradients: those of the pipe's outputs.
            retain_graph: whether this may be called again.

        Returns:
            The factor of all gradients; None: there are none.
        """
        self.returned = self.step.backward(self.cut(gradients), retain_graph=retain_graph)
        return Factor(1.0)

    def of_inputs(self, factor: Factor, *, retain_graph: bool) -> list[Tensor | None]:
        """The gradients of the pipe's input tensors."""
        of_inputs, self.returned = self.join(self.returned), []
        return of_inputs

    def of_parameters(self, stage: int, factor: Factor, *, retain_graph: bool) -> list[Tensor | None]:
        """The gradients of a stage's parameters."""
        return self.step.take_gradients(stage)


@dataclass
class LossInside:
    """The workers have run backward already, from a loss with the gradient `scale`.

    Attributes:
        step: the mini-batch.
        join: joins the input gradients of stage 0 into those of the pipe's input tensors.
        returned: the input gradients of stage 0.
        scale: the factor of all gradients.
        arrived: called with the factor when a backward has come to the first node, see `attach`.
        begun: called when a backward begins.
        lacks_scaler: whether a factor as large as that of a `GradScaler` is refused, since it comes too late.
        on_host: whether the host waits for the factor, so that one of 1 leaves the gradients as they are.
    """

    step: Step
    join: Callable[[Sequence[Message]], list[Tensor | None]]
    returned: list[Message]
    scale: float | Tensor = 1.0
    arrived: Callable[[Factor], None] | None = None
    begun: Callable[[], None] | None = None
    lacks_scaler: bool = False
    on_host: bool = False
    _latest: Factor | None = field(default=None, init=False)

    def begin(self, gradients: Sequence[Tensor | None], *, retain_graph: bool) -> Factor | None:
        """See `LossOutside`: returns the factor by which the gradients are still to be multiplied, mostly 1."""
        (gradient,) = gradients
        if gradient is None:  # a function of the user's, applied to the loss, has returned None in its backward
            return None
        if self.begun is not None:
            self.begun()
        self._latest = Factor.of(gradient.to("cpu") if self.on_host else gradient, self.scale)
        if self.lacks_scaler and self._latest.number >= _LARGE:
            raise RuntimeError(
                f"the loss was multiplied by {self._latest.number:g} before its backward, as a GradScaler does. But "
                "the pipe had computed its gradients in float16 without it, so small ones have become 0: give Pipe or "
                "attach grad_scaler=scaler; the loop stays as it is. A factor of another kind belongs into the call: "
                "pipe(x, target=y, loss_scale=factor)"
            )
        return self._latest

    def end(self, _: Tensor) -> None:
        """A backward that accumulates all gradients has come to the first node."""
        if self.arrived is not None and self._latest is not None:
            self.arrived(self._latest)

    def of_inputs(self, factor: Factor, *, retain_graph: bool) -> list[Tensor | None]:
        """See `LossOutside`."""
        gradients = self.join(self.returned)
        if not retain_graph:
            self.returned = []
        # Never in place: what came out of a backward may be one tensor for two inputs, or elements that share memory.
        return factor.times(gradients, keep=retain_graph or not factor.is_one)

    def of_parameters(self, stage: int, factor: Factor, *, retain_graph: bool) -> list[Tensor | None]:
        """Without `retain_graph` the buffers themselves, which autograd takes over without a copy."""
        return factor.times(self.step.take_gradients(stage, keep=retain_graph), keep=retain_graph)


Backward: TypeAlias = LossOutside | LossInside
"""The source of the gradients that the nodes of one mini-batch return."""


class StageNode(torch.autograd.Function):
    """One stage of a mini-batch whose forward is done."""

    @staticmethod
    def forward(
        ctx: Any,
        which: tuple[Backward, int, bool, tuple[Tensor, ...] | None, Sequence[Tensor]],
        token: Tensor,
        *sources: Tensor,
    ) -> Any:
        """Returns the next token, or for the last stage the outputs.

        Args:
            ctx: the node.
            which: the source of the gradients, common to the nodes of this mini-batch; the number of the stage, and
                whether it is the first one here; the joined outputs if this is the last one, and those of them that
                require no gradient. In one argument, since PyTorch looks at each.
            token: connects the node with the previous stage's.
            sources: for the first stage here the pipe's input tensors; then the stage's parameters.
        """
        # The node must not refer to an output, which refers to the node: the cycle would outlive the user's last
        # reference.
        ctx.shared, ctx.stage, ctx.is_first, outputs, fixed = which
        ctx.is_last = outputs is not None
        ctx.set_materialize_grads(False)
        # Saved and read so that a second backward without retain_graph raises PyTorch's own error.
        ctx.save_for_backward(token)
        if outputs is None:
            return torch.zeros((), dtype=torch.float64, device="cpu")
        ctx.mark_non_differentiable(*fixed)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Returns the stage's gradients; the last stage's node first runs what computes them."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a pipe cannot be differentiated twice (create_graph=True): its stages compute their gradients on "
                "graphs of their own. Compute a gradient penalty on the un-partitioned module, or outside of the pipe."
            )
        try:
            (token,) = ctx.saved_tensors
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(FREED)
            raise
        shared: Backward = ctx.shared
        retain_graph = torch_private.retains_graph()
        # The factor goes from node to node with the token's gradient. An attribute of the node could hold the factor of
        # another backward, which runs within a hook of this one.
        factor: Factor | None
        if ctx.is_last:
            with ShortTracebacks():
                factor = shared.begin(gradients, retain_graph=retain_graph)
        else:
            factor = None if gradients[0] is None else gradients[0].pipework_factor  # type: ignore[attr-defined]
        if factor is None:
            return (None,) * len(ctx.needs_input_grad)
        of_inputs = shared.of_inputs(factor, retain_graph=retain_graph) if ctx.is_first else []
        of_parameters = shared.of_parameters(ctx.stage, factor, retain_graph=retain_graph)
        carrying = None
        if ctx.needs_input_grad[1]:
            carrying = torch.zeros_like(token)
            carrying.pipework_factor = factor  # type: ignore[attr-defined]
        return (None, carrying, *of_inputs, *of_parameters)


def attach(
    shared: Backward,
    inputs: Sequence[Tensor],
    outputs: tuple[Tensor, ...],
    differentiable: Sequence[bool],
    stages: Sequence[int],
    *,
    rooted: bool = False,
    arrived: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, ...]:
    """Puts a mini-batch whose forward is done into the user's autograd graph.

    Args:
        shared: the source of the gradients.
        inputs: the pipe's input tensors; of several processes, those of this one.
        outputs: the joined outputs, without a graph.
        differentiable: for each output, whether it requires a gradient.
        stages: their numbers, in order; if the workers are processes, those of this process.
        rooted: whether the outputs require a gradient even if no input and no parameter here does.
        arrived: called when a backward that accumulates all gradients has come to the first node; needs `rooted`. One
            that wants some gradients only (`torch.autograd.grad`, `inputs=`) is no such backward.

    Returns:
        The outputs, as results of the graph.
    """
    fixed = [output for output, needs in zip(outputs, differentiable, strict=True) if not needs]
    apply: Callable[..., Any] = StageNode.apply
    token = torch.zeros((), dtype=torch.float64, device="cpu", requires_grad=True) if rooted else _NO_TOKEN
    if arrived is not None:
        token.register_post_accumulate_grad_hook(arrived)  # type: ignore[no-untyped-call]
    *others, last = stages
    for stage in others:
        first = stage == stages[0]
        token = apply(
            (shared, stage, first, None, ()), token, *(inputs if first else ()), *shared.step.parameters(stage)
        )
    sources = (*(() if others else inputs), *shared.step.parameters(last))
    return apply((shared, last, not others, outputs, fixed), token, *sources)  # type: ignore[no-any-return]


FEW: Final = 8
"""So many first losses a program may drop, for example because they are not finite."""


class UndeliveredLosses:
    """Counts the first losses that were dropped, until one is brought backward.

    With the loss inside a call computes all gradients, so `loss.backward()` is easily taken for superfluous; without it
    no gradient reaches a parameter. A loss that is still there may be one of several that are added up.

    Example:
        >>> losses = UndeliveredLosses()
        >>> [len(losses.doubts()) for _ in range(2)]
        [0, 0]
    """

    def __init__(self) -> None:
        self._losses: list[weakref.ref[LossInside]] | None = []  # None: the question is settled

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a pipe has had no losses."""
        return UndeliveredLosses, ()

    def add(self, loss: LossInside) -> None:
        """A loss that is about to be returned."""
        losses = self._losses  # a backward on another thread may settle the question at any moment
        if losses is not None:
            loss.begun = self._settle
            losses.append(weakref.ref(loss))

    def doubts(self) -> list[str]:
        """What there is to be warned of, once."""
        losses = self._losses
        if losses is None or sum(loss() is None for loss in losses) < FEW:
            return []
        self._settle()
        return [
            f"loss.backward() was called on none of the first {FEW} losses of this pipe: a call computes the gradients "
            "and loss.backward() delivers them to the parameters, so optimizer.step() has changed nothing. Call it "
            "after each pipe(x, target=y); where the value alone is wanted, call the pipe under torch.no_grad()"
        ]

    def _settle(self) -> None:
        self._losses = None
