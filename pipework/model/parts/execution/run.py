"""One run of a module's forward in one part: which units compute, which give what they gave, and where it ends."""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from pipework.model.parts.execution.absent import Absent
from pipework.model.parts.execution.leaves import (
    collect_tensors,
    flatten,
    is_plain,
    kept,
    mapped,
    tensors_in,
    unflatten,
)
from pipework.model.parts.execution.plan import EARLIER, GLUE, HERE, Source, positional_names
from pipework.runtime.random.streams import streams_inside
from pipework.torch_private import memory_key, version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch

    from pipework.model.parts.execution.absence_watch import AbsenceWatch
    from pipework.model.parts.execution.plan import PartPlan, UnitCall
    from pipework.model.parts.execution.side_outputs import SideOutputs
    from pipework.model.parts.execution.unit import StandIn, Unit


class LeaveForward(BaseException):
    """Ends a module's forward at the first unit of a later part; no `except Exception` of the module stops it."""


class PartRun:
    """One run of a part on one micro-batch.

    Args:
        plan: of the part.
        values: by call, what units of earlier parts gave; receives what those of this part give.
        absent: by call, the forms of tensors that units of earlier parts gave, and that nobody reads any more.
        device: where the part is.
        side_outputs: collects what units give beside what they return.
        stand_ins: by the name of a unit, what gives what the unit gave.

    Attributes:
        beside: by call, what units have given beside what they return.
        before: where side outputs ended before the present call; false: nothing is collected.
        computing: the unit that computes at present; what it calls is its own.
        given: what a stand-in gives in its present call, if it was given anything.
        watch: notices what the glue computes from tensors without values; None: not in this run.
    """

    def __init__(
        self,
        plan: PartPlan,
        values: dict[str, Any],
        absent: Mapping[str, str],
        device: torch.device,
        side_outputs: SideOutputs,
        stand_ins: Mapping[str, StandIn],
    ) -> None:
        self._plan = plan
        self.values = values
        self._forms = absent
        self._placeholders: dict[str, Tensor] = {}
        self._device = device
        self._side_outputs = side_outputs
        self._stand_ins = stand_ins
        self._calls = plan.calls
        self._counts: dict[str, int] = defaultdict(int)
        self._returned: list[tuple[str, Tensor, int]] = []
        self._absent: dict[int, Tensor] = {}
        self.beside: dict[str, Any] = {}
        self.before: Any = None
        self._reached = False  # the forward of the unit that computes, by way of its twin
        self._start_stream: Callable[[int], None] | None = None
        self.computing: Unit | None = None
        self.given: tuple[Any] | None = None
        self.watch: AbsenceWatch | None = None

    def inputs(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs as the forward takes them; those that it changes in place are copies, since each part does so."""
        names = positional_names(self._plan.trace.parameters, len(arguments))
        return (
            tuple([self._input(name, value) for name, value in zip(names, arguments, strict=True)]),
            {name: self._input(name, value) for name, value in keywords.items()},
        )

    def begin(self) -> None:
        """Called before the forward: what it draws itself before the first unit, it draws in every part."""
        self._start_stream = streams_inside()
        if self._start_stream is not None:
            self._start_stream(0)

    def call(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit gives in this run.

        Raises:
            LeaveForward: the unit belongs to a later part.
            RuntimeError: the sample did not call it, or later, or it reads what it did not read there.
        """
        # What is done for each call is written out here, as it costs as much as a small unit.
        name = unit.unit_name
        count = self._counts[name]
        self._counts[name] = count + 1
        calls = self._calls.get(name, ())
        if count >= len(calls):
            raise self._called_more_often(name)
        call = calls[count]
        start_stream = self._start_stream
        if call.place == HERE:
            tensors: list[Tensor] = []
            hides = collect_tensors(arguments, tensors)
            if keywords:
                hides |= collect_tensors(keywords.values(), tensors)
            if self._absent:
                self._refuse_absent(call, tensors)
            if hides:  # an object could hold any of them
                tensors += [tensor for _, tensor, _ in self._returned]
            versions = [version_of(tensor) for tensor in tensors]
            if start_stream is not None:
                start_stream(call.stream)
            self.before, self._reached = self._side_outputs.mark(), False
            self.computing = unit
            try:
                if self.watch is None:
                    output = unit.computed(*arguments, **keywords)
                else:
                    output = self.watch.outside(unit.computed, arguments, keywords)
            finally:
                self.computing = None
            if self.before and not self._reached:  # a compiled unit, or one with a forward of its own
                self._keep_beside(unit, self._side_outputs.since(self.before))
            if versions != [version_of(tensor) for tensor in tensors]:
                self._allow_changes(call, tensors, versions)
            self.values[call.name] = kept(output)  # the glue may empty a list that it gets
        elif call.place == EARLIER:
            output = self._given_earlier(call, name, arguments, keywords)
        elif call.place == GLUE:
            return self._computed(unit, arguments, keywords)
        else:
            raise LeaveForward(call.name)
        if start_stream is not None:
            start_stream(call.stream + 1)
        if call.is_changed:  # in place, by the glue, which does so again in later parts
            return mapped(Tensor, Tensor.clone, output)
        if isinstance(output, Tensor):  # the usual case
            self._returned.append((call.name, output, version_of(output)))
        else:
            self._follow(call.name, output)
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
        model = self._plan.trace.model
        return RuntimeError(
            f"{reader or f'the forward of {model}'} reads a tensor that it did not read for the sample, and which was "
            f"not sent to it: the forward of {model} takes another way for this mini-batch, and so it cannot be cut as "
            "it was for the sample. Attach the pipe with a sample for which it takes this way, in the same mode and "
            "with the same flags, or let a unit do what depends on the data"
        )

    def refuse_changes(self) -> None:
        """Raises a RuntimeError if the glue has changed in place what a unit gave, as it did not in the sample."""
        changed = sorted({call for call, tensor, version in self._returned if version_of(tensor) != version})
        if changed:
            raise RuntimeError(
                f"{self._plan.trace.model}'s forward changes {', '.join(changed)} in place, as it did not for the "
                "sample: compute a new tensor instead"
            )

    def _keep_beside(self, unit: Unit, beside: Any) -> None:
        if beside:
            count = self._counts[unit.unit_name] - 1
            self.beside[self._calls[unit.unit_name][count].name] = beside

    def _input(self, name: str, value: Any) -> Any:
        if is_plain(value):
            return value
        if isinstance(value, Tensor):  # the usual cases
            return self._input_tensor(Source("input", name, 0), value)
        leaves, form = flatten(value)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, Absent):
                leaves[number] = self.absent(leaf)
            elif isinstance(leaf, Tensor):
                leaves[number] = self._input_tensor(Source("input", name, number), leaf)
        return unflatten(leaves, form)

    def _input_tensor(self, source: Source, tensor: Tensor) -> Tensor:
        if source in self._plan.trace.changed_inputs:
            return tensor.clone()
        self._follow(f"input {source.name}", tensor)
        return tensor

    def _given_earlier(self, call: UnitCall, unit: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """What a unit of an earlier part gave."""
        form = self._forms.get(call.name)
        if form is not None:
            output = self._placeholders.get(form)
            if output is None:  # one for all of the same form
                output = self._placeholders[form] = self.absent(Absent.of_text(form))
        elif call.name in self.values:
            if call.name in self.beside:
                self._side_outputs.add(self._present(self.beside[call.name]))
            output = self._present(self.values[call.name])
        else:
            raise RuntimeError(
                f"{call.name} was called after units that the sample called later: {self._plan.trace.model}'s forward "
                "takes another way for this mini-batch, and so it cannot be cut as it was for the sample"
            )
        if not self._side_outputs.mark():  # its hooks would collect nothing
            return output
        return self._stand_ins[unit].replayed(output, arguments, keywords)

    def _refuse_absent(self, call: UnitCall, tensors: Iterable[Tensor]) -> None:
        if self.lacks_any(tensors):
            raise self.reads_absent(call.name)

    def _follow(self, origin: str, tree: Any) -> None:
        """Notes tensors which the glue must not change in place."""
        for tensor in tensors_in(tree):
            self._returned.append((origin, tensor, version_of(tensor)))

    def _allow_changes(self, call: UnitCall, tensors: Iterable[Tensor], versions: Iterable[int]) -> None:
        """Notes what a unit has changed in place, such as an activation its input; the glue must not.

        Args:
            call: of the unit.
            tensors: that it could reach.
            versions: of them, before.

        Raises:
            RuntimeError: an earlier part gave it, and the forward reads it again.
        """
        trace = self._plan.trace
        changed: dict[int, int] = {}
        for tensor, before in zip(tensors, versions, strict=True):
            if version_of(tensor) != before:
                changed[memory_of(tensor)] = version_of(tensor) - before
        for number, (origin, tensor, then) in enumerate(self._returned):
            grown = changed.get(memory_of(tensor), 0)
            if not grown or version_of(tensor) == then:
                continue
            if trace.positions.get(origin, self._plan.start) < self._plan.start and self._is_read_after(origin, call):
                raise RuntimeError(
                    f"{call.name} changes in place what {origin} returned in an earlier part, and {trace.model}'s "
                    "forward reads that again: compute a new tensor there (inplace=False)"
                )
            self._returned[number] = origin, tensor, then + grown

    def _is_read_after(self, origin: str, call: UnitCall) -> bool:
        return any(
            source.kind == "call" and source.name == origin and max(uses) > call.position
            for source, uses in self._plan.trace.uses.items()
        )

    def _called_more_often(self, unit: str) -> RuntimeError:
        return RuntimeError(
            f"{self._plan.trace.model}'s forward calls {unit} more often than for the sample, and so it cannot be cut "
            "as it was for the sample: give a sample for which it makes all calls, or put what depends on the data "
            "into a unit"
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

    def _computed(self, unit: Unit, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        self.before = None  # what it gives beside that, each part collects by itself
        self.computing = unit
        try:
            return unit.computed(*arguments, **keywords)
        finally:
            self.computing = None

    def _present(self, tree: Any) -> Any:
        """A nested value with a tensor for everything that is absent."""
        return mapped(Absent, self.absent, tree)


def version_of(tensor: Tensor) -> int:
    """How often a tensor has been changed in place; not known in inference mode."""
    return 0 if tensor.is_inference() else version(tensor)


def memory_of(tensor: Tensor) -> int:
    """Equal for tensors that share memory."""
    key = memory_key(tensor)
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
