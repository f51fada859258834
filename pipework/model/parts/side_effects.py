"""What a forward does beside returning a value: the dry run puts it back, or refuses it where parts would differ."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pipework.model.parts.leaves import held_by, tensors_in
from pipework.model.parts.skeleton import own_attributes
from pipework.model.parts.trace import CannotCut, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_PLAIN = (bool, int, float, complex, str, bytes)
_COLLECTIONS = (list, dict, set, OrderedDict)


@contextlib.contextmanager
def generators_put_back() -> Iterator[list[str]]:
    """Puts back the random generators of Python and numpy; afterwards the list names those that the block drew from.

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
    """Afterwards the attributes of a module and of the modules inside are as before, also what lists and dicts hold."""
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


def numbers_of(module: nn.Module) -> dict[str, Any]:
    """Of each attribute of a module and each buffer the numbers, texts and the like in it; None: it is of another kind.

    Example:
        >>> module = nn.Module()
        >>> module.steps, module.sizes, module.scale = 3, [1, 2], None
        >>> numbers_of(module)
        {'steps': (<class 'int'>, 3), 'sizes': [1, 2], 'scale': None}
    """
    return {name: _numbers_in(value) for name, value in (*own_attributes(module).items(), *module._buffers.items())}


def _numbers_in(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) not in _COLLECTIONS:
        return None
    items = [len(value)] if isinstance(value, set) else [*value, *(value.values() if isinstance(value, dict) else ())]
    return [each if isinstance(each, _PLAIN) else type(each) for each in items]


def changed_numbers(module: nn.Module, before: Mapping[str, Any]) -> list[str]:
    """The attributes of a module in which other numbers are than before.

    Args:
        module: as it is now.
        before: what `numbers_of` returned before.
    """
    now = {name: numbers for name, numbers in numbers_of(module).items() if numbers is not None}
    return [name for name, numbers in now.items() if before.get(name) is not None and before[name] != numbers]


def other_tensors(unit: nn.Module) -> list[Tensor]:
    """The tensors of a unit that are no parameters: its buffers, and those in other attributes of its modules.

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
        containers: copies, by name; their forward may keep what it computed from no tensor, such as a mask.
    """

    def __init__(self, units: Mapping[str, nn.Module], containers: Mapping[str, nn.Module]) -> None:
        self._units = [(name, unit, own_attributes(unit)) for name, unit in units.items()]
        self._containers = [
            (name, module, numbers_of(module), _tensors_of(module)) for name, module in containers.items()
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
        for name, module, numbers, tensors in self._containers:
            kept = changed_numbers(module, numbers)
            for each, held in _tensors_of(module).items():
                known = {id(tensor) for tensor in tensors.get(each, ())}
                kept += [each] if any(id(tensor) not in known and follows(tensor) for tensor in held) else []
            if kept:
                where = f"self.{name}.{kept[0]}" if name else f"self.{kept[0]}"
                raise CannotCut(
                    f"{model}'s forward keeps a state in {where}, and each part runs this forward and would keep its "
                    "own: return it, compute it outside of the forward, or let a unit keep it"
                )


def _tensors_of(module: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors in each attribute of a module and each buffer, and in the objects there."""
    found: dict[str, list[Tensor]] = {}
    for name, value in (*own_attributes(module).items(), *module._buffers.items()):
        with contextlib.suppress(Exception):  # some configurations refuse to give an attribute
            found[name] = held_by(value)
    return found


class ChangesInPlace:
    """Tensors that units change in place: the forward may read them before the change or after it, but not both.

    A message holds such a tensor as it is after the change. A later part runs the glue before the change again, and
    would compute something else with it.

    Args:
        model: its class, as messages call it.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._origins: dict[int, Source] = {}
        # The tensor before the change (None: the glue has computed it), after it, and the position of the call.
        self._changes: list[tuple[Source | None, Source, int]] = []

    def note_origin(self, memory: int, source: Source) -> None:
        """Notes that a tensor is an input, or what a unit has given."""
        self._origins[memory] = source

    def note(self, memory: int, call: str, position: int) -> Source:
        """Notes that a call changes a tensor; returns the source of the changed tensor."""
        after = Source("changed", call, len(self._changes))
        self._changes.append((self._origins.get(memory), after, position))
        self._origins[memory] = after
        return after

    def merged(self, uses: dict[Source, set[float]], changed_by_glue: set[str]) -> dict[Source, frozenset[float]]:
        """The uses of all tensors; a use after a change counts as a use of the tensor that was changed.

        Args:
            uses: see `Trace`.
            changed_by_glue: the calls whose results the forward itself changes in place.

        Raises:
            CannotCut: another part would read the tensor as it was at another time.
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
    """Tensors that a unit leaves in a list, a dict or an object among its arguments.

    Each part makes such an object anew, without what a unit of another part has left there. An object may be a cache in
    which each unit reads only its own tensors. It is refused if others read them, and so is any list or dict.

    Args:
        model: its class, as messages call it.

    Attributes:
        calling: the call of the unit whose operators run at present; "": operators of the glue run.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        self._left: dict[int, tuple[str, Tensor]] = {}
        self.calling = ""

    def note(self, before: list[Tensor], handed: Any, own: Any) -> None:
        """Notes what the present call has left.

        Args:
            before: the tensors in the arguments before the call.
            handed: the arguments after the call: copies of lists and dicts, with the objects that the forward has made.
            own: the arguments with the forward's own lists and dicts.

        Raises:
            CannotCut: the call has left a tensor in a list or a dict.
        """
        known, shared = {id(tensor) for tensor in before}, {id(tensor) for tensor in held_by(own)}
        for tensor in held_by(handed):
            if id(tensor) not in known:
                self._left[id(tensor)] = self.calling, tensor
                if id(tensor) not in shared:
                    raise self._error(self.calling)

    def refuse_reading(self, tensors: Iterable[Tensor]) -> None:
        """Raises a CannotCut if another unit, or the glue, reads a tensor that a unit has left."""
        for tensor in tensors:
            call, _ = self._left.get(id(tensor), (self.calling, None))
            if call != self.calling:
                raise self._error(call)

    def _error(self, call: str) -> CannotCut:
        return CannotCut(
            f"{call} puts a tensor into a list, dict or object that {self._model}'s forward hands it, and each part "
            "makes its own: return the tensor, or let one unit hold all modules that use it"
        )
