"""A part of a model: a layer that runs the model's own forward, from the first to the last of its units."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
from torch import Tensor, nn

from pipework.model.parts import run as runs
from pipework.model.parts.leaves import Absent, flatten, tensors_in, unflatten
from pipework.model.parts.run import AbsenceWatch, LeaveForward, PartRun
from pipework.model.parts.skeleton import Unit
from pipework.model.parts.trace import Source, positional_names
from pipework.runtime.random.streams import mix
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipework.model.parts.adapter import Adapter
    from pipework.model.parts.skeleton import AbsentUnit
    from pipework.model.parts.trace import PartSpan

_WATCHED_FIRST: Final = 16  # micro-batches, in which most ways through a forward are taken


class Message(NamedTuple):
    """What goes from part to part.

    Attributes:
        inputs: the positional and the keyword arguments of the model.
        values: by call, what units have given.
        beside: by call, what they gave beside it, if anything.
        absent: by call, the form of a tensor that the call gave, nothing else, and that no later part reads. Most calls
            of a long model are here, where they cost little.
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
        span: what it does.
        adapter: of the model's library.
        absent_units: by the name of a unit, what gives what the unit gave elsewhere.

    Attributes:
        state_prefix: what names of tensors begin with that in a state dict are the model's own.
    """

    state_prefix: ClassVar[str] = "model."

    def __init__(
        self, model: nn.Module, span: PartSpan, adapter: Adapter, absent_units: Mapping[str, AbsentUnit]
    ) -> None:
        super().__init__()
        self.model = model
        self.span = span
        self._adapter = adapter
        self._absent_units = dict(absent_units)
        self.training = model.training
        self._runs: dict[tuple[bool, bool], int] = {}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the model returns, or the message to the next part."""
        if arguments and isinstance(arguments[0], Message):
            message = arguments[0]
        else:
            message = Message.first(self._adapter.inputs(arguments, keywords))
        run = PartRun(
            self.span,
            dict(message.values),
            message.absent,
            self._device(message),
            self._adapter.side_outputs,
            self._absent_units,
        )
        run.beside.update(message.beside)
        arguments, named = run.inputs(*message.inputs)
        if self.span.is_last:
            named = self._adapter.micro_batch(named)
        if self._is_watched():
            run.watch = AbsenceWatch(run)
        with runs.using(run), run.watch or contextlib.nullcontext():
            run.begin()
            try:
                output = self.model.forward(*arguments, **named)
            except LeaveForward:
                run.refuse_changes()
                return self._message(message, run)
        if not self.span.is_last:
            raise RuntimeError(
                f"the forward of {self.span.trace.model} ended before its last part: for the sample it also called "
                f"{', '.join(self.span.trace.order[self.span.stop :][:3])}; put what depends on the data into a unit"
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
        return ", ".join(self.span.trace.order[self.span.start : self.span.stop])

    def _message(self, before: Message, run: PartRun) -> Message:
        """What goes to the next part.

        Args:
            before: what came to this one.
            run: of this part, which has ended.
        """
        arguments, keywords = before.inputs
        names = positional_names(self.span.trace.parameters, len(arguments))
        inputs = (
            tuple([self._thinned("input", *each) for each in zip(names, arguments, strict=True)]),
            {name: self._thinned("input", name, value) for name, value in keywords.items()},
        )
        message = Message(inputs, {}, dict(run.beside), dict(before.absent))
        for call, output in run.values.items():
            if call in run.beside:
                message.values[call], message.beside[call] = self._thinned("call", call, (output, run.beside[call]))
                continue
            value = self._thinned("call", call, output)
            if isinstance(value, Absent):
                message.absent[call] = str(value)
            else:
                message.values[call] = value
        return message

    def _thinned(self, kind: str, name: str, tree: Any) -> Any:
        """A nested value without the tensors that no later part reads. Numbers of tokens and the like stay."""
        leaves, form = flatten(tree)
        for number, leaf in enumerate(leaves):
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if is_float and not self.span.is_sent(Source(kind, name, number)):
                leaves[number] = Absent.of(leaf)
        return unflatten(leaves, form)

    def _device(self, message: Message) -> torch.device:
        """Where the part is."""
        tensors = [*itertools.islice(self.model.parameters(), 1)] or tensors_in(message)
        return tensors[0].device if tensors else torch.device("cpu")
