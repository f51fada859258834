"""Copies of a model's containers around its units. No parameter is copied."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from pipework.model.parts.execution.absent import Absent
from pipework.model.parts.execution.unit import StandIn, become_container, twin_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from pipework.model.parts.adapter import Adapter


class Skeleton:
    """Makes the copies of one model.

    Args:
        model: any module.
        units: of the model, by name.
        adapter: knows what else is not to be copied.

    Attributes:
        containers: the modules around the units, by their names in the model.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], adapter: Adapter) -> None:
        self._model = model
        self.units = units
        self._adapter = adapter
        self._inside = [module for unit in units.values() for module in unit.modules()]
        inside = {id(module) for module in self._inside}
        self.containers = {name: module for name, module in model.named_modules() if id(module) not in inside}

    def stand_ins(self) -> dict[str, StandIn]:
        """For each unit, what stands in place of it in another part."""
        made: dict[str, Any] = {
            name: self._adapter.stand_in(StandIn(name, unit), unit) for name, unit in self.units.items()
        }
        return made

    def copy(
        self,
        local: Collection[str],
        reads: Callable[[str], bool],
        stand_ins: Mapping[str, StandIn],
        *,
        shares: bool = True,
    ) -> nn.Module:
        """The model around some of its units.

        Args:
            local: names of units that are to be there; stand-ins are in place of the others.
            reads: whether a parameter of a container is to be there, by its name.
            stand_ins: by the name of a unit.
            shares: whether it has the same buffers and values of attributes as the model, and no copies of them.
        """
        memo: dict[int, object] = {id(each): each for each in self._adapter.shared(self._model)}
        for module in self._inside:  # a container may refer to a module in a unit
            memo[id(module)] = module
        for name, unit in self.units.items():
            memo[id(unit)] = twin_of(name, unit) if name in local else stand_ins[name]
        for module in self._model.modules():
            memo.update({id(parameter): parameter for parameter in module._parameters.values()})
        for module in self.containers.values() if shares else ():
            memo.update({id(buffer): buffer for buffer in module._buffers.values()})
            memo.update({id(value): value for value in own_attributes(module).values() if not refers_to_module(value)})
        hooks = [value for name, value in vars(self._model).items() if name.endswith("_hooks")]
        memo.update({id(each): type(each)() for each in hooks})  # a part calls the forward alone
        whole = copy.deepcopy(self._model, memo)
        for name, module in self.containers.items():
            own = memo[id(module)]
            assert isinstance(own, nn.Module)
            become_container(own, module)
            prefix = f"{name}." if name else ""
            elsewhere = {
                each: Absent.of(parameter)
                for each, parameter in module._parameters.items()
                if parameter is not None and not reads(f"{prefix}{each}")
            }
            for each in elsewhere:
                del own._parameters[each]
            own.__dict__["elsewhere"] = elsewhere
        return whole


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without those that every module has, such as its children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def refers_to_module(value: Any, seen: set[int] | None = None) -> bool:
    """Whether an attribute refers to a module, so that each part needs its own.

    Example:
        >>> refers_to_module({"layers": [nn.ReLU()]}), refers_to_module({"sizes": [1, 2]})
        (True, False)
    """
    seen = set() if seen is None else seen
    if isinstance(value, nn.Module):
        return True
    if id(value) in seen or isinstance(value, type):
        return False
    seen.add(id(value))
    inside: list[Any] = [*getattr(value, "__dict__", {}).values(), getattr(value, "__self__", None)]
    if isinstance(value, dict):
        inside += value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        inside += value
    return any(refers_to_module(each, seen) for each in inside)
