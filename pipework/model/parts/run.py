"""One run of a model's forward in one part: units compute, or return what they returned elsewhere, up to its end."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pipework import torch_private
from pipework.model.parts.leaves import Absent, flatten, held_by, mapped, tensors_in, unflatten
from pipework.model.parts.trace import EARLIER, LATER, Source, input_name, positional_names
from pipework.runtime.failure import add_note
from pipework.runtime.random.streams import streams_inside
from pipework.torch_private import counted_version, memory_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipework.model.parts.adapter import SideOutputs
    from pipework.model.parts.skeleton import Unit
    from pipework.model.parts.trace import PartSpan, UnitCall


class LeaveForward(BaseException):
    """Ends a module's forward at the first unit of a later part; no `except Exception` of the module stops it."""


class Message(NamedTuple):
    """What goes from part to part.

    Attributes:
        inputs: the positional and the keyword arguments of the model.
        values: by call, what the unit returned, with `Absent` in place of tensors that no later part reads.
        beside: by call, what the unit's hooks collected, such as the router logits of transformers.
    """

    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    values: dict[str, Any]
    beside: dict[str, Any]

    @classmethod
    def first(cls, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Message:
        """The message to the first part."""
        return cls(inputs, {}, {})


class PartRun:
    """One run of a part on one micro-batch.

    Args:
        span: the calls that the part computes.
        message: from the part before.
        device: of the part.
        side_outputs: the lists to which hooks of units append.

    Attributes:
        is_computing: whether a unit computes at present; the modules that it calls are its own affair.
        watch: notices glue that computes with tensors without values; None: this run is not watched.
    """

    def __init__(self, span: PartSpan, message: Message, device: torch.device, side_outputs: SideOutputs) -> None:
        self._span = span
        self._message = message
        self._device = device
        self._side_outputs = side_outputs
        self._values, self._beside = dict(message.values), dict(message.beside)
        self._counts: dict[str, int] = defaultdict(int)
        self._returned: list[tuple[str, Tensor, int]] = []  # what the glue must not change: its origin, its version
        self._absent: dict[int, Tensor] = {}
        self._of_form: dict[Absent, Tensor] = {}  # one tensor without values for all of the same form
        self._start_stream: Callable[[int], None] | None = None
        self.is_computing = False
        self.watch: AbsenceWatch | None = None

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the forward; an input that the forward changes in place is a copy, since each part does."""
        return self._mapped_inputs(self._input)

    def next_message(self) -> Message:
        """What goes to the next part: the inputs and all that units returned, without tensors that no later part reads.

        Raises:
            RuntimeError: the glue has changed in place what a unit returned, as it did not for the sample.
        """
        changed = sorted({call for call, tensor, version in self._returned if counted_version(tensor) != version})
        if changed:
            raise RuntimeError(
                f"{self._span.trace.model}'s forward changes {', '.join(changed)} in place, as it did not for the "
                "sample: compute a new tensor instead"
            )
        inputs = self._mapped_inputs(functools.partial(self._thinned, "input"))
        message = Message(inputs, {}, {})
        for call, output in self._values.items():
            message.values[call], beside = self._thinned("call", call, (output, self._beside.get(call)))
            if beside is not None:
                message.beside[call] = beside
        return message

    def begin(self) -> None:
        """Called before the forward: the glue before the first unit draws the same random numbers in every part."""
        self._start_stream = streams_inside()
        self._enter_stream(0)

    def call(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit returns in this run.

        Raises:
            LeaveForward: the unit belongs to a later part.
            RuntimeError: for the sample the forward did not call the unit here, or the unit did not read a tensor that
                it reads now.
        """
        name = unit.unit_name
        count = self._counts[name]
        self._counts[name] += 1
        calls = self._span.calls.get(name, ())
        if count >= len(calls):
            raise self._other_way(f"{self._span.trace.model}'s forward calls {name} more often than for the sample")
        call = calls[count]
        if call.place == LATER:
            raise LeaveForward(call.name)
        is_earlier = call.place == EARLIER
        output = self._from_earlier(call) if is_earlier else self._compute(call, unit, arguments, keywords)
        self._enter_stream(call.stream + 1)
        if call.is_changed:  # by the glue, in place; later parts do it again and need the output as it is now
            return mapped(Tensor, Tensor.clone, output)
        self._protect(call.name, output)
        return output

    def lacks_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these tensors has no values here."""
        return bool(self._absent) and any(memory_of(tensor) in self._absent for tensor in tensors)

    def mark_absent(self, tensors: Iterable[Tensor]) -> None:
        """Notes tensors that the glue computed from tensors without values."""
        self._absent.update((memory_of(tensor), tensor) for tensor in tensors)

    def reads_absent(self, reader: str = "") -> RuntimeError:
        """The error of a call, or of the forward itself, that reads a tensor without values."""
        reader = reader or f"the forward of {self._span.trace.model}"
        return self._other_way(f"{reader} reads a tensor that it did not read for the sample, and which was not sent")

    def absent(self, tensor: Tensor | Absent) -> Tensor:
        """A tensor without values in place of one that only another part has."""
        form = tensor if isinstance(tensor, Absent) else Absent.of(tensor)
        if form not in self._of_form:
            self._of_form[form] = form.tensor(self._device)
            self.mark_absent([self._of_form[form]])
        return self._of_form[form]

    def _compute(self, call: UnitCall, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit of this part computes."""
        values = (*arguments, *keywords.values())  # one by one: most are a tensor or None, which need no look inside
        tensors = held_by(*values)  # also those that an object holds
        if self.lacks_any(tensor for value in values for tensor in tensors_in(value)):
            raise self.reads_absent(call.name)
        versions = [counted_version(tensor) for tensor in tensors]
        self._enter_stream(call.stream)
        if call.changes:  # the glue reads what the unit returns, and later parts may need what it was given
            arguments, keywords = mapped(Tensor, functools.cache(Tensor.clone), (arguments, keywords))
        before = self._side_outputs.mark()
        self.is_computing = True
        try:
            with contextlib.nullcontext() if self.watch is None else self.watch.outside():
                output = unit.computed(*arguments, **keywords)
        except BaseException as error:
            add_note(error, f"in {unit.unit_name} ({type(unit).__name__})")
            raise
        finally:
            self.is_computing = False
        if beside := self._side_outputs.since(before) if before else {}:
            self._beside[call.name] = beside
        if versions != [counted_version(tensor) for tensor in tensors]:
            raise RuntimeError(
                f"{call.name} changes in place what it is given, as it did not for the sample, or what an object holds "
                "that it is given: compute a new tensor there (inplace=False)"
            )
        self._values[call.name] = unflatten(*flatten(output))  # the glue may empty a list that it gets
        return output

    def _from_earlier(self, call: UnitCall) -> Any:
        """What a unit of an earlier part returned."""
        if call.name not in self._values:
            raise self._other_way(f"{call.name} was called after units that the sample called later")
        if call.name in self._beside:
            self._side_outputs.add(mapped(Absent, self.absent, self._beside[call.name]))
        return mapped(Absent, self.absent, self._values[call.name])

    def _input(self, name: str, value: Any) -> Any:
        if input_name(name) in self._span.trace.changed:
            return mapped(Absent, self._absent_copy, mapped(Tensor, Tensor.clone, value))
        self._protect(input_name(name), value)
        return mapped(Absent, self.absent, value)

    def _absent_copy(self, form: Absent) -> Tensor:
        """A tensor without values that the glue may change in place: it has memory of its own."""
        copied = self.absent(form).clone()
        self.mark_absent([copied])
        return copied

    def _mapped_inputs(self, function: Callable[[str, Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a function makes of the name and the value of each input."""
        arguments, keywords = self._message.inputs
        names = positional_names(self._span.trace.parameters, len(arguments))
        return tuple(map(function, names, arguments)), {name: function(name, each) for name, each in keywords.items()}

    def _thinned(self, kind: str, name: str, tree: Any) -> Any:
        """A nested value without the floats that no later part reads. Integers and masks are small, and stay."""
        leaves, form = flatten(tree)
        for number, leaf in enumerate(leaves):
            is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
            if is_float and not self._span.is_sent(Source(kind, name, number)):
                leaves[number] = Absent.of(leaf)
        return unflatten(leaves, form)

    def _protect(self, origin: str, tree: Any) -> None:
        """Notes tensors that the glue must not change in place."""
        self._returned += [(origin, tensor, counted_version(tensor)) for tensor in tensors_in(tree)]

    def _enter_stream(self, number: int) -> None:
        if self._start_stream is not None:
            self._start_stream(number)

    def _other_way(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"{what}: the forward of {self._span.trace.model} takes another way for this mini-batch, and so it cannot "
            "be cut as it was for the sample. Attach the pipe with a sample for which it takes this way, in the same "
            "mode and with the same flags, or let a unit do what depends on the data"
        )


class AbsenceWatch(torch_private.ThreadDispatchMode):
    """Notices glue that computes with tensors without values, as it did not for the sample.

    Some tensors were not sent to a part: for the sample its glue reads their shapes alone. If the forward takes another
    way for a later batch, the glue may compute with such a tensor, and the result would be wrong without an error. So
    in some runs every operator of the glue is watched, as in the dry run: what an operator computes from a tensor
    without values is marked as one, too. Units are not watched.

    Args:
        run: of the part.
    """

    def __init__(self, run: PartRun) -> None:
        super().__init__()
        self._run = weakref.proxy(run)  # which keeps this: without a cycle, its tensors are freed when it ends

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator.

        Raises:
            RuntimeError: the glue reads a number from a tensor without values.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._run.lacks_any(tensors_in((args, kwargs))):
            made = tensors_in(result)
            if not made:  # a number
                raise self._run.reads_absent()
            self._run.mark_absent((*made, *torch_private.written_arguments(func, args, kwargs)))
        return result

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Inside, nothing is watched: the operators of a unit run as in other steps."""
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()


_thread = threading.local()  # its attribute `run` is the run of the current thread


def current() -> PartRun | None:
    """The run of this thread; None: no part runs here, and units compute as they do without a pipe."""
    return getattr(_thread, "run", None)


@contextlib.contextmanager
def using(run: PartRun | None) -> Iterator[None]:
    """Inside, units on this thread belong to this run."""
    before, _thread.run = current(), run
    try:
        yield
    finally:
        _thread.run = before
