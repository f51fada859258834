"""What a forward keeps on modules: put back after a dry run, and refused where each part would keep its own."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from pipework.model.parts.analysis.refusal import CannotCut
from pipework.model.parts.execution.leaves import held_by, tensors_in
from pipework.model.parts.execution.skeleton import own_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_PLAIN = (bool, int, float, complex, str, bytes)
_COLLECTIONS = (list, dict, set, OrderedDict)


@contextlib.contextmanager
def put_back(module: nn.Module) -> Iterator[None]:
    """Afterwards, the attributes of a module and of those inside are as before, lists and dicts among them too."""
    kept = [(vars(each), dict(vars(each))) for each in module.modules()]
    contents = [
        (value, copy.copy(value))
        for _, attributes in kept
        for value in attributes.values()
        if type(value) in _COLLECTIONS
    ]
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
    return [
        name
        for name, value in own_attributes(module).items()
        if isinstance(value, _PLAIN) and name in before and _differs(value, before[name])
    ]


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
            (name, module, own_attributes(module), dict(module._buffers), _contents(module))
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
        for name, module, attributes, buffers, contents in self._containers:
            kept = changed_numbers(module, attributes)
            for each, (plain, tensors) in _contents(module).items():
                before = contents.get(each)
                if before is None:  # what is new is looked at below
                    continue
                held = {id(tensor) for tensor in before.tensors}
                if plain != before.plain or any(id(tensor) not in held and follows(tensor) for tensor in tensors):
                    kept.append(each)
            for each, value in (*own_attributes(module).items(), *module._buffers.items()):
                is_new = value is not attributes.get(each) and value is not buffers.get(each)
                if is_new and any(follows(tensor) for tensor in tensors_in(value)):
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
        plain: its numbers, texts and the like in their order, and how many things of other kinds it has.
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
    items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    if isinstance(value, set):
        return [len(items)]
    return [each if isinstance(each, _PLAIN) else type(each) for each in items]


def _differs(value: Any, before: Any) -> bool:
    return isinstance(before, _PLAIN) and (type(value) is not type(before) or value != before)
