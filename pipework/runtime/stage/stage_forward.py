"""A stage's forward as a callable: (leaves, structure, micro-batch) -> (outputs, structure).

    leaves --1--> entered --2--> layers, one after the other --3--> loss --4--> outputs, with their graph

    1  the layers get further tensors of the same memory, which are no leaves (see `boundary`)
    2  `run_layers`, which also runs the copies of stages that are measured
    3  in the last stage, if the loss is inside
    4  the value of the last layer is taken apart into tensors and a structure

F, the first pass of a checkpointed micro-batch and R call the same object. Something of your own around a stage's
computation, such as a captured graph, a profiler or `saved_tensors_hooks`, is another callable of this signature around
this one: `StageRun._computations` puts them together, anew for each run. What it keeps belongs into `Stage`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipework.runtime.failure import add_note
from pipework.runtime.stage.layer_errors import layer_text, note_returned
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    from pipework.runtime.stage.kept import AnyStructure
    from pipework.runtime.stage.stage import Layer
    from pipework.runtime.stage.stage_run import StageRun

    Outputs: TypeAlias = tuple[tuple[Tensor, ...], AnyStructure]
    # Of leaves, the structure around them, and the number of the micro-batch.
    Forward: TypeAlias = Callable[[tuple[Tensor, ...], AnyStructure, int], Outputs]
    Look: TypeAlias = Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], None]  # at leaves and outputs
    EnterStream: TypeAlias = Callable[[int, int], None]  # of a layer and a micro-batch


class StageForward:
    """One stage's forward, in one run.

    Args:
        run: the mini-batch on the stage.
        enter_stream: called before each layer, if random numbers may be drawn.
        looks: called with the leaves and the outputs.
    """

    def __init__(self, run: StageRun, enter_stream: EnterStream | None, looks: Sequence[Look]) -> None:
        self._stage, self._in_place, self._ports, self._loss = run.stage, run.in_place, run.ports, run.loss
        self._grad = run.trains
        self._enter_stream = enter_stream
        self._looks = looks
        # The last layer takes the target, too, if there is no loss function.
        takes_target = run.loss is not None and run.loss.is_of_layer
        self._layers = run.stage.layers_with_target if takes_target else run.stage.layers

    def __call__(self, leaves: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> Outputs:
        """The outputs and their structure."""
        in_place, ports = self._in_place, self._ports
        run = self._run_entered if ports is None else partial(ports.run, self._run_entered)
        entered = in_place.entered(leaves, micro_batch)  # 1
        outputs, structure = run(entered, structure, micro_batch)
        in_place.see(leaves, entered, outputs)
        for look in self._looks:
            look(leaves, outputs)
        return outputs, structure

    def _run_entered(self, entered: tuple[Tensor, ...], structure: AnyStructure, micro_batch: int) -> Outputs:
        value = entered[0] if structure is None else nested.unflatten(entered, structure)
        stage, loss, enter_stream = self._stage, self._loss, self._enter_stream
        # The structure in stage 0 has positional and keyword arguments; None, a single tensor, is the usual case.
        is_call = structure is not None and not stage.index
        if loss is None:
            value = run_layers(self._layers, value, micro_batch, stage.giver, enter_stream, is_call=is_call)  # 2
            try:
                return nested.flatten(value)  # 4
            except TypeError as error:
                add_note(error, f"returned by {stage.last_layer}")
                raise
        loss.trains = loss.trains or any(each.requires_grad for each in entered)
        tensors, around = loss.targets.pop(micro_batch)
        target = tensors[0] if around is None else nested.unflatten(tensors, around)
        more = (target,) if loss.is_of_layer else ()
        value = run_layers(self._layers, value, micro_batch, stage.giver, enter_stream, is_call=is_call, target=more)
        return loss.outputs(value, target, micro_batch, enter_stream, grad=self._grad)  # 3


def run_layers(
    layers: Sequence[Layer],
    value: Any,
    micro_batch: int = 0,
    giver: str | None = None,
    enter_stream: EnterStream | None = None,
    *,
    is_call: bool = False,
    target: tuple[Any, ...] = (),
) -> Any:
    """Runs layers in order; an error of one gets its name.

    Args:
        layers: of one stage.
        value: what the first layer gets.
        micro_batch: its number.
        giver: what has returned the value, for messages; None: the user.
        enter_stream: called before each layer, if random numbers may be drawn.
        is_call: whether the value is a pair of positional and keyword arguments.
        target: a further argument of the last layer, if it computes the loss.

    Example:
        >>> from torch import nn, ones
        >>> from pipework.runtime.stage.stage import Layer
        >>> run_layers([Layer(nn.ReLU(), 0, "0", True)], ((-ones(2),), {}), is_call=True)
        tensor([0., 0.])
    """
    taker = layers[-1].number if target else -1
    for module, number, name, takes_tuple_whole in layers:
        if enter_stream is not None:
            enter_stream(number, micro_batch)
        try:
            if is_call:
                (arguments, keywords), is_call = value, False
            else:
                arguments, keywords = value if type(value) is tuple and not takes_tuple_whole else (value,), {}
            if number == taker:
                arguments = (*arguments, *target)
            value = module(*arguments, **keywords)
        except BaseException as error:
            place, layer = number - layers[0].number, layer_text(name, module)
            add_note(error, f"in {layer}")
            before = layer_text(layers[place - 1].name, layers[place - 1].module) if place else giver
            note_returned(error, value, before, layer)
            if number == taker and isinstance(error, TypeError):
                add_note(
                    error,
                    "the pipe has no loss_fn, so the last layer is given the target and returns the loss; "
                    "or give Pipe a loss_fn",
                )
            raise
    return value
