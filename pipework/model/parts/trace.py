"""What a dry run found out about a model's forward, and what one part does of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

END = math.inf  # the position of the forward's end, behind all calls
EARLIER, HERE, LATER = "earlier", "here", "later"  # the part in which a call computes, as one part sees it


class CannotCut(ValueError):
    """A model cannot be cut into parts; the message says why."""


def call_name(unit: str, count: int) -> str:
    """A call of a unit, as messages between parts write it.

    Args:
        unit: its name.
        count: how often it was called before in this forward.

    Example:
        >>> call_name("encoder.norm", 1), unit_of("encoder.norm#1")
        ('encoder.norm#1', 'encoder.norm')
    """
    return f"{unit}#{count}"


def input_name(argument: str) -> str:
    """An argument of the forward, told from calls of units."""
    return f"input {argument}"


def unit_of(call: str) -> str:
    """The name of the unit of a call."""
    return call.rpartition("#")[0]


class Source(NamedTuple):
    """Where a tensor of the forward comes from: an input, a call of a unit, a parameter, or a buffer of a unit.

    Attributes:
        kind: "input", "call", "parameter", "buffer" (any tensor of a unit that is no parameter), or "changed" (a call
            has changed the tensor in place).
        name: of the argument, of the call, of the unit, or of the parameter of a container.
        number: among the leaves of the nested value.
    """

    kind: str
    name: str
    number: int


class UnitCall(NamedTuple):
    """A call of a unit, as one part sees it.

    Attributes:
        name: see `call_name`.
        place: where it computes.
        stream: the number of the random stream from which the unit draws. The glue behind the unit draws from stream
            `stream + 1`, in each part the same numbers, so that they do not depend on the cut.
        is_changed: whether the glue changes in place what it gives.
        changes: whether it changes in place what it is given.
    """

    name: str
    place: str
    stream: int
    is_changed: bool
    changes: bool


def positional_names(parameters: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The names of the first positional arguments of a forward; those of `*args` are numbers.

    Example:
        >>> positional_names(("x", "mask"), 1), positional_names(("x",), 3)
        (('x',), ('x', '1', '2'))
    """
    return (*parameters, *map(str, range(len(parameters), count)))[:count]


@dataclass(frozen=True)
class Trace:
    """What the forward did in a dry run.

    Attributes:
        model: its class, as messages call it.
        order: the calls of units.
        uses: by source, the positions of the calls to which it goes; `END`: it goes to the result, or the forward reads
            its values.
        changed: what the forward changes in place: calls that gave it, and inputs, as `input_name` writes them.
        changing: the calls that change their arguments in place.
        inputs: the tensors that the sample had.
        parameters: the names of the forward's positional arguments.
    """

    model: str
    order: tuple[str, ...] = ()
    uses: dict[Source, frozenset[float]] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    changing: frozenset[str] = frozenset()
    inputs: frozenset[Source] = frozenset()
    parameters: tuple[str, ...] = ()

    def joined(self, other: Trace | None) -> Trace:
        """What the forward does in either of two dry runs; this trace if their calls differ."""
        if other is None or other.order != self.order:
            return self
        uses = {
            source: self.uses.get(source, frozenset()) | other.uses.get(source, frozenset())
            for source in {**self.uses, **other.uses}
        }
        changing = self.changing | other.changing
        return replace(self, uses=uses, changed=self.changed | other.changed, changing=changing)


@dataclass(frozen=True)
class PartSpan:
    """What one part does: the calls from one position to another.

    Attributes:
        trace: of the whole model.
        start: the position of its first call.
        stop: the position of the first call of the next part.
        is_last: whether it returns the result.
    """

    trace: Trace
    start: int
    stop: int
    is_last: bool

    @cached_property
    def calls(self) -> dict[str, tuple[UnitCall, ...]]:
        """By the name of a unit, its calls in their order."""
        found: dict[str, list[UnitCall]] = {}
        for position, name in enumerate(self.trace.order):
            place = EARLIER if position < self.start else HERE if position < self.stop else LATER
            stream, changes = 2 * position + 1, name in self.trace.changing
            call = UnitCall(name, place, stream, name in self.trace.changed, changes)
            found.setdefault(unit_of(name), []).append(call)
        return {unit: tuple(calls) for unit, calls in found.items()}

    @property
    def units(self) -> tuple[str, ...]:
        """The names of the units that compute here, in the order of their first calls."""
        return tuple(dict.fromkeys(map(unit_of, self.trace.order[self.start : self.stop])))

    @property
    def ends(self) -> str:
        """The first and the last unit, for messages.

        Example:
            >>> trace = Trace("Net", ("blocks.0#0", "blocks.1#0", "blocks.0#1"))
            >>> PartSpan(trace, 0, 2, False).ends, PartSpan(trace, 2, 3, True).ends
            ('blocks.0 .. blocks.1 (2)', 'blocks.0')
        """
        names = self.units
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"

    @cached_property
    def _read_later(self) -> frozenset[Source]:
        return frozenset(source for source, uses in self.trace.uses.items() if max(uses, default=-1) >= self.stop)

    def reads(self, source: Source) -> bool:
        """Whether this part reads a tensor."""
        uses = self.trace.uses.get(source, frozenset())
        return any(self.start <= use < self.stop or (self.is_last and use == END) for use in uses)

    def is_sent(self, source: Source) -> bool:
        """Whether the next part gets a tensor; every part gets an input that the sample did not have."""
        return source in self._read_later or (source.kind == "input" and source not in self.trace.inputs)
