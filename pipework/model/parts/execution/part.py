"""A part of a model: a layer that runs the model's own forward, from the first to the last of its units."""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from pipework.model.parts.execution import run as runs
from pipework.model.parts.execution.absence_watch import AbsenceWatch
from pipework.model.parts.execution.absent import Absent
from pipework.model.parts.execution.leaves import flatten, tensors_in, unflatten
from pipework.model.parts.execution.plan import Source, positional_names
from pipework.model.parts.execution.run import LeaveForward, PartRun
from pipework.model.parts.execution.unit import Unit
from pipework.runtime.random.streams import mix
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipework.model.parts.adapter import Adapter
    from pipework.model.parts.execution.plan import PartPlan
    from pipework.model.parts.execution.unit import StandIn

_WATCHED_FIRST: Final = 16  # micro-batches, in which most ways through a forward are taken


class Message(NamedTuple):
    """What goes from part to part.

    Attributes:
        inputs: the positional and the keyword arguments of the model.
        values: by call, what units have given.
        beside: by call, what they gave beside it, if anything.
        absent: by the form of a tensor, the positions of the calls that gave it, nothing else, and that no later part
            reads. Most calls of a long model are here, where they cost little.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    values: dict[str, Any]
    beside: dict[str, Any]
    absent: dict[str, str]

    @classmethod
    def first(cls, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Message:
        """What goes to the first part."""
        return cls(inputs, {}, {}, {})


class Part(nn.Module):
    """One of the consecutive layers into which a model has been cut.

    The first one takes what the model takes, the last one returns what the model returns. In between goes a message:
    the model's inputs and what units have given, without the tensors that no later part reads.

    Args:
        model: a copy of the model's containers around the units of this part.
        plan: what it does.
        adapter: of the model's library.
        stand_ins: by the name of a unit, what gives what the unit gave elsewhere.

    Attributes:
        state_prefix: what names of tensors begin with that in a state dict are the model's own.
    """

    state_prefix: ClassVar[str] = "model."

    def __init__(self, model: nn.Module, plan: PartPlan, adapter: Adapter, stand_ins: Mapping[str, StandIn]) -> None:
        super().__init__()
        self.model = model
        self.plan = plan
        self._adapter = adapter
        self._stand_ins = dict(stand_ins)
        self._first_parameter: tuple[nn.Module | None, str] = (None, "")  # looking for it takes as long as a small unit
        self.training = model.training
        self._runs: dict[tuple[bool, bool], int] = {}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the model returns, or the message to the next part."""
        if arguments and isinstance(arguments[0], Message):
            message = arguments[0]
        else:
            message = Message.first(self._adapter.inputs(arguments, keywords))
        order = self.plan.trace.order
        run = PartRun(
            self.plan,
            dict(message.values),
            {order[int(each)]: form for form, calls in message.absent.items() for each in calls.split()},
            self._device(message),
            self._adapter.side_outputs,
            self._stand_ins,
        )
        run.beside.update(message.beside)
        given, named = run.inputs(*message.inputs)
        if self.plan.is_last:
            named = self._adapter.micro_batch(named)
        if self._is_watched():
            run.watch = AbsenceWatch(run)
        with runs.using(run), run.watch or contextlib.nullcontext():
            run.begin()
            try:
                output = self.model.forward(*given, **named)
            except LeaveForward:
                run.refuse_changes()
                return self._message(message, run)
        if not self.plan.is_last:
            raise RuntimeError(
                f"the forward of {self.plan.trace.model} ended before its last part: for the sample it also called "
                f"{', '.join(self.plan.trace.order[self.plan.stop :][:3])}; put what depends on the data into a unit"
            )
        result = self._adapter.result(output)
        if run.watch is not None and run.lacks_any(tensors_in(result)):
            raise run.reads_absent()
        return result

    def watch_again(self) -> None:
        """The model has changed, so that its forward may take another way from now on."""
        self._runs.clear()

    def _is_watched(self) -> bool:
        kind = self.training, torch.is_grad_enabled()
        number = self._runs.get(kind, 0)
        self._runs[kind] = number + 1
        return number < _WATCHED_FIRST or is_checked(number)

    def units_here(self) -> dict[str, nn.Module]:
        """The units of this part by their names in the model, whose hooks and dictionaries of tensors they share."""
        units = (module for module in self.model.modules() if isinstance(module, Unit) and not module.is_elsewhere)
        return {unit.unit_name: unit for unit in units}

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Compiles the units; the model's own forward around them ends with an exception, which no graph has."""
        for unit in self.units_here().values():
            unit.compile(*arguments, **keywords)

    def initialiser_of(
        self, module: nn.Module, own: Callable[[], object] | None, seed: int
    ) -> Callable[[], object] | None:
        """What fills a module that was built on the meta device; see `materialize_layers`.

        Args:
            module: of this part.
            own: its own `reset_parameters`.
            seed: of the model; what a module draws depends on it and on the module's name.
        """
        name = next((name for name, each in self.model.named_modules() if each is module), None)
        if name is None:  # this part itself
            return None
        of_library = self._adapter.initialiser(self.model, name)
        fillers = [each for each in (own, of_library) if each is not None]

        def fill() -> None:
            torch.default_generator.manual_seed(mix(seed, zlib.crc32(name.encode()), 0))
            # It draws for parameters that only other parts read, too, so that what it draws next is the same.
            absent = module.__dict__.get("elsewhere", {})
            module.__dict__.update({each: form.tensor(torch.device("cpu")).clone() for each, form in absent.items()})
            try:
                for each in fillers:
                    each()
            finally:
                for each in absent:
                    module.__dict__.pop(each, None)

        return fill if fillers else None

    def extra_repr(self) -> str:
        """The units of this part."""
        return ", ".join(self.plan.trace.order[self.plan.start : self.plan.stop])

    def _message(self, before: Message, run: PartRun) -> Message:
        """What goes to the next part.

        Args:
            before: what came to this one.
            run: of this part, which has ended.
        """
        values, beside, positions = run.values, run.beside, self.plan.trace.positions
        absent: dict[str, list[str]] = {}
        forms: dict[Any, str] = {}  # most calls give tensors of one form
        for call in self.plan.thinned:
            if call not in values:
                continue
            output = values[call]
            if call in beside:
                values[call], beside[call] = self._thinned("call", call, (output, beside[call]))
            elif not isinstance(output, Tensor | Absent):
                values[call] = self._thinned("call", call, output)
            elif isinstance(output, Absent) or (call in self.plan.unread and output.is_floating_point()):
                kind = output.dtype, output.shape
                form = forms.get(kind)
                if form is None:
                    form = forms[kind] = str(output if isinstance(output, Absent) else Absent.of(output))
                    absent.setdefault(form, [before.absent[form]] if form in before.absent else [])
                absent[form].append(str(positions[call]))
                del values[call]
        return Message(
            self._thinned_inputs(*before.inputs) if self.plan.thins_inputs else before.inputs,
            values,
            beside,
            {**before.absent, **{form: " ".join(numbers) for form, numbers in absent.items()}},
        )

    def _thinned_inputs(
        self, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        names = positional_names(self.plan.trace.parameters, len(arguments))
        return (
            tuple([self._thinned("input", *each) for each in zip(names, arguments, strict=True)]),
            {name: self._thinned("input", name, value) for name, value in keywords.items()},
        )

    def _thinned(self, kind: str, name: str, tree: Any) -> Any:
        """A nested value without the tensors that no later part reads. Numbers of tokens and the like stay."""
        if isinstance(tree, Tensor):  # the usual case
            is_read = not tree.is_floating_point() or self.plan.is_sent(Source(kind, name, 0))
            return tree if is_read else Absent.of(tree)
        leaves, form = flatten(tree)
        for number, leaf in enumerate(leaves):
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if is_float and not self.plan.is_sent(Source(kind, name, number)):
                leaves[number] = Absent.of(leaf)
        return unflatten(leaves, form)

    def _device(self, message: Message) -> torch.device:
        """Where the part is."""
        module, name = self._first_parameter
        there = None if module is None else module._parameters.get(name)
        if there is None:  # the first time, or it has been taken away
            owners = (
                (each, name)
                for each in self.model.modules()
                for name, own in each._parameters.items()
                if own is not None
            )
            self._first_parameter = module, name = next(owners, (None, ""))
            there = None if module is None else module._parameters[name]
        tensors = tensors_in(message) if there is None else [there]
        return tensors[0].device if tensors else torch.device("cpu")
