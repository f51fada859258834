"""One run of a module's forward in one part: which units compute, which give what they gave, and where it ends."""

from __future__ import annotations

import contextlib
import enum
import threading
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pipework import torch_private
from pipework.model.parts.leaves import Absent, flatten, mapped, tensors_in, unflatten
from pipework.model.parts.trace import EARLIER, GLUE, LATER, Source, positional_names
from pipework.runtime.random.streams import streams_inside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pipework.model.parts.adapter import SideOutputs
    from pipework.model.parts.skeleton import AbsentUnit, Unit
    from pipework.model.parts.trace import PartSpan, UnitCall


_HOLD_NOTHING = (
    Tensor, type(None), bool, int, float, complex, str, bytes, slice, range, enum.Enum, torch.dtype, torch.device,
)  # fmt: skip


class LeaveForward(BaseException):
    """Ends a module's forward at the first unit of a later part; no `except Exception` of the module stops it."""


class PartRun:
    """One run of a part on one micro-batch.

    Args:
        span: of the part.
        values: by call, what units of earlier parts gave; receives what those of this part give.
        absent: by call, the forms of tensors that units of earlier parts gave, and that nobody reads any more.
        device: where the part is.
        side_outputs: collects what units give beside what they return.
        absent_units: by the name of a unit, what gives what the unit gave in another part.

    Attributes:
        beside: by call, what units have given beside what they return.
        before: where side outputs ended before the present call; false: nothing is collected.
        computing: the unit that computes at present; what it calls is its own.
        replayed: what an absent unit gives in its present call, if it has got anything.
        watch: notices what the glue computes from tensors without values; None: not in this run.
    """

    def __init__(
        self,
        span: PartSpan,
        values: dict[str, Any],
        absent: Mapping[str, str],
        device: torch.device,
        side_outputs: SideOutputs,
        absent_units: Mapping[str, AbsentUnit],
    ) -> None:
        self._span = span
        self.values = values
        self._forms = absent
        self._device = device
        self._side_outputs = side_outputs
        self._absent_units = absent_units
        self._counts: dict[str, int] = defaultdict(int)
        self._returned: list[tuple[str, Tensor, int]] = []  # what the glue must not change: from where, its version
        self._absent: dict[int, Tensor] = {}
        self.beside: dict[str, Any] = {}
        self.before: Any = None
        self._reached = False  # the forward of the unit that computes, by way of its twin
        self._start_stream: Callable[[int], None] | None = None
        self.computing: Unit | None = None
        self.replayed: tuple[Any] | None = None
        self.watch: AbsenceWatch | None = None

    def inputs(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as the forward takes them; those that it changes in place are copies, since each part does so."""
        names = positional_names(self._span.trace.parameters, len(arguments))
        return (
            tuple([self._input(name, value) for name, value in zip(names, arguments, strict=True)]),
            {name: self._input(name, value) for name, value in keywords.items()},
        )

    def begin(self) -> None:
        """Called before the forward: what it draws itself before the first unit, it draws in every part."""
        self._start_stream = streams_inside()
        self._enter_stream(0)

    def call(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit gives in this run.

        Raises:
            LeaveForward: the unit belongs to a later part.
            RuntimeError: the sample did not call it, or later, or it reads what it did not read there.
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
        if call.place == GLUE:
            return self._computed(unit, arguments, keywords)
        if call.place == EARLIER:
            output = self._from_earlier(call, name, arguments, keywords)
        else:
            output = self._compute(call, unit, arguments, keywords)
        self._enter_stream(call.stream + 1)
        if call.is_changed:  # in place, by the glue, which does so again in later parts
            return mapped(Tensor, Tensor.clone, output)
        self._protect(call.name, output)
        return output

    def forward(
        self, unit: Unit, forward: Callable[..., Any], arguments: tuple[Any, ...], keywords: Mapping[str, Any]
    ) -> Any:
        """What the own forward of a unit gives, which the glue has called, or its call while something is collected."""
        if self.computing is None:
            return self.call(unit, arguments, keywords)
        before = self._side_outputs.mark()
        output = forward(*arguments, **keywords)
        if self.computing is unit:
            self._reached = True
            self._keep_beside(unit, self._side_outputs.since(before))
        return output

    def lacks_any(self, tensors: Iterable[Tensor]) -> bool:
        """Whether any of these tensors has no values here."""
        return bool(self._absent) and any(memory_of(tensor) in self._absent for tensor in tensors)

    def mark_absent(self, tensors: Iterable[Tensor]) -> None:
        """Notes tensors that were computed from others without values."""
        self._absent.update((memory_of(tensor), tensor) for tensor in tensors)

    def reads_absent(self, reader: str = "") -> RuntimeError:
        """The error of a call, or of the forward itself, that reads a tensor without values."""
        reader = reader or f"the forward of {self._span.trace.model}"
        return self._other_way(f"{reader} reads a tensor that it did not read for the sample, and which was not sent")

    def refuse_changes(self) -> None:
        """Raises a RuntimeError if the glue has changed in place what a unit gave, as it did not in the sample."""
        changed = sorted({call for call, tensor, version in self._returned if version_of(tensor) != version})
        if changed:
            raise RuntimeError(
                f"{self._span.trace.model}'s forward changes {', '.join(changed)} in place, as it did not for the "
                "sample: compute a new tensor instead"
            )

    def parameters_of(self, forms: tuple[Absent, ...]) -> Iterator[Tensor]:
        """Tensors without values in place of parameters of which this part has some only."""
        return (form.tensor(self._device) for form in forms)

    def absent(self, tensor: Tensor | Absent) -> Tensor:
        """A tensor without values in place of one that another part has."""
        form = tensor if isinstance(tensor, Absent) else Absent.of(tensor)
        made = form.tensor(self._device)
        self._absent[memory_of(made)] = made
        return made

    def _compute(self, call: UnitCall, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit of this part computes."""
        leaves = flatten((arguments, keywords))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if self.lacks_any(tensors):
            raise self.reads_absent(call.name)
        if not all(isinstance(leaf, _HOLD_NOTHING) for leaf in leaves):  # an object could hold any of them
            tensors += [tensor for _, tensor, _ in self._returned]
        versions = [version_of(tensor) for tensor in tensors]
        self._enter_stream(call.stream)
        self.before, self._reached = self._side_outputs.mark(), False
        self.computing = unit
        try:
            compute = unit.computed if self.watch is None else partial(self.watch.outside, unit.computed)
            output = compute(*arguments, **keywords)
        finally:
            self.computing = None
        if self.before and not self._reached:  # a compiled unit, or one with a forward of its own
            self._keep_beside(unit, self._side_outputs.since(self.before))
        if versions != [version_of(tensor) for tensor in tensors]:
            self._allow_changes(call, tensors, versions)
        self.values[call.name] = unflatten(*flatten(output))  # the glue may empty a list that it gets
        return output

    def _computed(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a module computes that every part runs."""
        self.before = None  # what it gives beside that, each part collects by itself
        self.computing = unit
        try:
            return unit.computed(*arguments, **keywords)
        finally:
            self.computing = None

    def _from_earlier(self, call: UnitCall, unit: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit of an earlier part gave."""
        if call.name in self._forms:
            output: Any = self.absent(Absent.of_text(self._forms[call.name]))
        elif call.name in self.values:
            if call.name in self.beside:
                self._side_outputs.add(mapped(Absent, self.absent, self.beside[call.name]))
            output = mapped(Absent, self.absent, self.values[call.name])
        else:
            raise self._other_way(f"{call.name} was called after units that the sample called later")
        if not self._side_outputs.mark():  # its hooks would collect nothing
            return output
        return self._absent_units[unit].replay(output, arguments, keywords)

    def _allow_changes(self, call: UnitCall, tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
        """Notes what a unit has changed in place, such as an activation its input; the glue must not.

        Args:
            call: of the unit.
            tensors: that it could reach.
            versions: of them, before.

        Raises:
            RuntimeError: an earlier part gave it, and the forward reads it again.
        """
        trace, start = self._span.trace, self._span.start
        grown = {memory_of(tensor): version_of(tensor) - then for tensor, then in zip(tensors, versions, strict=True)}
        for number, (origin, tensor, then) in enumerate(self._returned):
            more = grown.get(memory_of(tensor), 0)
            if not more or version_of(tensor) == then:
                continue
            of_origin = [uses for source, uses in trace.uses.items() if source[:2] == ("call", origin)]
            if trace.positions.get(origin, start) < start and any(max(uses) > call.position for uses in of_origin):
                raise RuntimeError(
                    f"{call.name} changes in place what {origin} returned in an earlier part, and {trace.model}'s "
                    "forward reads that again: compute a new tensor there (inplace=False)"
                )
            self._returned[number] = origin, tensor, then + more

    def _input(self, name: str, value: Any) -> Any:
        leaves, form = flatten(value)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Absent):
                leaves[number] = self.absent(leaf)
            elif isinstance(leaf, Tensor) and Source("input", name, number) in self._span.trace.changed_inputs:
                leaves[number] = leaf.clone()
            else:
                self._protect(f"input {name}", leaf)
        return unflatten(leaves, form)

    def _protect(self, origin: str, tree: Any) -> None:
        """Notes tensors which the glue must not change in place."""
        self._returned += [(origin, tensor, version_of(tensor)) for tensor in tensors_in(tree)]

    def _keep_beside(self, unit: Unit, beside: Any) -> None:
        if beside:
            call = self._span.calls[unit.unit_name][self._counts[unit.unit_name] - 1]
            self.beside[call.name] = beside

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
    """Notices glue that computes with values that are not here, as it did not for the sample.

    The glue of a part gets tensors without values in place of those that it needs for the sample's way through the
    forward for their shapes alone. If the forward takes another way, it may use one of them, and what it computes would
    be wrong without an error. So in some runs every operator of the glue is watched, as the dry run watched it: what is
    computed from tensors without values is marked as such, too. Units are not watched.

    Args:
        run: of the part.
    """

    def __init__(self, run: PartRun) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operator.

        Raises:
            RuntimeError: the forward reads a value that is not here.
        """
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._run.lacks_any(tensors_in((args, kwargs))):
            made = tensors_in(result)
            if not made:  # a number
                raise self._run.reads_absent()
            self._run.mark_absent((*made, *torch_private.written_arguments(func, args, kwargs)))
        return result

    def outside(self, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Calls a function that is not watched: no operator of it may run otherwise than in other steps."""
        self.__exit__(None, None, None)
        try:
            return function(*arguments, **keywords)
        finally:
            self.__enter__()


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; not known in inference mode."""
    return 0 if tensor.is_inference() else torch_private.version(tensor)


def memory_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    key = torch_private.memory_key(tensor)
    return id(tensor) if key is None else key


class _ThreadRun(threading.local):
    """The run of the current thread."""

    run: PartRun | None = None


_thread = _ThreadRun()


def current() -> PartRun | None:
    """The run of this thread; None: units compute as they do without a pipe."""
    return _thread.run


@contextlib.contextmanager
def using(run: PartRun | None) -> Iterator[None]:
    """Inside, units on this thread belong to this run."""
    before, _thread.run = _thread.run, run
    try:
        yield
    finally:
        _thread.run = before
