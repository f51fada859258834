"""What a forward does beside what it returns, as a dry run finds it: put back, or refused where parts would differ."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from pipework.model.parts.leaves import held_by, tensors_in
from pipework.model.parts.skeleton import own_attributes
from pipework.model.parts.trace import CannotCut, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

_PLAIN = (bool, int, float, complex, str, bytes)
_COLLECTIONS = (list, dict, set, OrderedDict)


@contextlib.contextmanager
def generators_put_back() -> Iterator[list[str]]:
    """Puts back the generators of Python and of numpy; afterwards the list names those that were drawn from.

    Example:
        >>> with generators_put_back() as drawn:
        ...     _ = random.random()
        >>> drawn
        ['random']
    """
    drawn: list[str] = []
    numpy: Any = sys.modules.get("numpy.random")  # None: nobody has imported it
    python, before = random.getstate(), None if numpy is None else numpy.get_state(legacy=False)
    try:
        yield drawn
    finally:
        if random.getstate() != python:
            drawn.append("random")
            random.setstate(python)
        if numpy is not None and str(numpy.get_state(legacy=False)) != str(before):
            drawn.append("numpy.random")
            numpy.set_state(before)


@contextlib.contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards, the attributes of a module and of those inside are as before, lists and dicts among them too."""
    kept = [(vars(each), dict(vars(each))) for each in module.modules()]
    values = [value for _, attributes in kept for value in attributes.values() if type(value) in _COLLECTIONS]
    contents = [(value, copy.copy(value)) for value in values]
    try:
        yield
    finally:
        for value, before in contents:
            value.clear()
            value.extend(before) if isinstance(value, list) else value.update(before)
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)


def changed_numbers(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """The attributes of a module whose value is a number or a text and was another one before.

    Args:
        module: as it is now.
        before: its attributes before.
    """
    now = own_attributes(module).items()
    pairs = [(name, value, before[name]) for name, value in now if isinstance(value, _PLAIN) and name in before]
    return [name for name, new, old in pairs if isinstance(old, _PLAIN) and (type(new) is not type(old) or new != old)]


def other_tensors(unit: nn.Module) -> list[Tensor]:
    """The tensors of a unit that are no parameters: its buffers, and what else its modules hold.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> norm.scale = norm.running_var + 1
        >>> len(other_tensors(norm))
        4
    """
    values = [value for module in unit.modules() for value in own_attributes(module).values()]
    held = [tensor for value in values if type(value) in (Tensor, tuple, *_COLLECTIONS) for tensor in tensors_in(value)]
    return [*unit.buffers(), *(tensor for tensor in held if not isinstance(tensor, nn.Parameter))]


class KeptState:
    """What the modules of a model hold before a dry run, to find out what its forward keeps on them.

    Args:
        units: by name; the forward around them must not set their attributes.
        containers: copies, by name; their forward may keep what follows from no tensor, such as a mask.
    """

    def __init__(self, units: Mapping[str, nn.Module], containers: Mapping[str, nn.Module]) -> None:
        self._units = [(name, unit, own_attributes(unit)) for name, unit in units.items()]
        self._containers = [
            (name, module, {**own_attributes(module), **module._buffers}, _contents(module))
            for name, module in containers.items()
        ]

    def refuse_changes(self, model: str, follows: Callable[[Tensor], bool]) -> None:
        """Raises an error if the forward keeps what each part would keep for itself.

        Args:
            model: its class, as messages call it.
            follows: whether a tensor was computed from inputs, from what units gave, or from parameters.
        """
        for name, unit, attributes in self._units:
            for each, value in own_attributes(unit).items():
                if each not in attributes or attributes[each] is not value:
                    raise CannotCut(
                        f"{model}'s forward sets {name}.{each} from outside of the unit {name}, which may run in "
                        "another part: pass it as an argument"
                    )
        for name, module, attributes, contents in self._containers:
            kept = changed_numbers(module, attributes)
            for each, (plain, tensors) in _contents(module).items():
                if each in contents:
                    held = {id(tensor) for tensor in contents[each].tensors}
                    new = [tensor for tensor in tensors if id(tensor) not in held]
                    kept += [each] if plain != contents[each].plain or any(map(follows, new)) else []
            for each, value in (*own_attributes(module).items(), *module._buffers.items()):
                if value is not attributes.get(each) and any(map(follows, tensors_in(value))):
                    kept.append(each)
            if kept:
                where = f"self.{name}.{kept[0]}" if name else f"self.{kept[0]}"
                raise CannotCut(
                    f"{model}'s forward keeps a state in {where}, and each part runs this forward and would keep its "
                    "own: return it, compute it outside of the forward, or let a unit keep it"
                )


class _Contents(NamedTuple):
    """What an attribute held at one time, which parts share.

    Attributes:
        plain: its numbers, texts and the like in their order, and the types of what else it has.
        tensors: those in it, and in objects in it.
    """

    plain: list[Any]
    tensors: list[Tensor]


def _contents(module: nn.Module) -> dict[str, _Contents]:
    """Of the attributes of a module that may hold something."""
    return {
        name: _Contents(_plain_in(value), _held_in(value))
        for name, value in own_attributes(module).items()
        if not isinstance(value, (*_PLAIN, Tensor, nn.Module, type)) and value is not None
    }


def _held_in(value: Any) -> list[Tensor]:
    try:
        return held_by(value)
    except Exception:  # some configurations refuse to give an attribute
        return []


def _plain_in(value: Any) -> list[Any]:
    if type(value) not in _COLLECTIONS:
        return []
    if isinstance(value, set):
        return [len(value)]
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    return [each if isinstance(each, _PLAIN) else type(each) for each in items]


class ChangesInPlace:
    """What units change in place: the forward may read it afterwards, or what it was before, but not both.

    A message holds such a tensor as it is in the end. A later part that computes from it again what the forward has
    computed before the change would get something else.

    Args:
        model: its class, as messages call it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._origins: dict[int, Source] = {}
        # The tensor before (None: the forward itself has computed it) and after; the position of the call.
        self._changes: list[tuple[Source | None, Source, int]] = []

    def note_origin(self, memory: int, source: Source) -> None:
        """Notes that a tensor is an input, or what a unit has given."""
        self._origins[memory] = source

    def note(self, memory: int, call: str, position: int) -> Source:
        """Notes that a call changes a tensor; returns what is to be followed from now on."""
        after = Source("changed", call, len(self._changes))
        self._changes.append((self._origins.get(memory), after, position))
        self._origins[memory] = after
        return after

    def merged(
        self, uses: dict[Source, set[float]], changed_by_glue: Collection[str]
    ) -> dict[Source, frozenset[float]]:
        """The uses of all tensors, with those after a change as uses of what was changed.

        Args:
            uses: see `Trace`.
            changed_by_glue: the calls whose results the forward itself changes in place.

        Raises:
            CannotCut: another part would read something else.
        """
        found = {source: set(positions) for source, positions in uses.items()}
        for before, after, position in reversed(self._changes):
            read = found.pop(after, set())
            if before is None or before.name in changed_by_glue:  # each part computes it again
                is_other = bool(read)
            else:
                is_other = any(use > position for use in found.get(before, ()))
                found.setdefault(before, set()).update(read)
            if is_other:
                raise CannotCut(
                    f"{after.name} changes in place what {self._model}'s forward reads again, or has computed with "
                    f"before: use what {after.name} returns, or compute a new tensor there (inplace=False)"
                )
        return {source: frozenset(positions) for source, positions in found.items()}


class LeftTensors:
    """Tensors that a unit leaves in a list, a dict or an object that the forward has handed it.

    Each part makes such an object anew, so that what a unit of another part has left there would be missing. A cache
    in which each unit finds only what it has left itself is no harm.

    Args:
        model: its class, as messages call it.

    Attributes:
        calling: the call of a unit whose operators run at present; "": the glue's.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._left: dict[int, tuple[str, Tensor]] = {}
        self.calling = ""

    def note(self, before: list[Tensor], handed: Any, own: Any) -> None:
        """Notes what the present call has left.

        Args:
            before: the tensors in what the unit was handed.
            handed: that afterwards: the objects of the forward, in copies of its lists and dicts.
            own: what the forward has handed.

        Raises:
            CannotCut: it was a list or a dict.
        """
        known, shared = {id(tensor) for tensor in before}, {id(tensor) for tensor in held_by(own)}
        for tensor in held_by(handed):
            if id(tensor) not in known:
                self._left[id(tensor)] = self.calling, tensor
                if id(tensor) not in shared:
                    raise self._error(self.calling)

    def refuse_reading(self, tensors: Iterable[Tensor]) -> None:
        """Raises a CannotCut if another unit, or the glue, reads what a unit has left."""
        for tensor in tensors:
            call, _ = self._left.get(id(tensor), (self.calling, None))
            if call != self.calling:
                raise self._error(call)

    def _error(self, call: str) -> CannotCut:
        return CannotCut(
            f"{call} puts a tensor into a list, dict or object that {self._model}'s forward hands it, and each part "
            "makes its own: return the tensor, or let one unit hold all modules that use it"
        )
