"""The units of a module: the largest modules that are called as a whole, and at which it can be cut.

A container, whose own forward calls units, is cut; what its forward does between them is *glue*. A block of a list is
a unit, and so is any other module that holds no block: an embedding, a norm, a head. A module without parameters
(a pooling, an activation, a dropout) is one, too, where its input has a gradient; only the dry run can tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Collection

_LISTS = (nn.ModuleList, nn.Sequential)
_SHARE = 0.5  # a unit with more of all parameters than this is opened, so that there is something to cut


def find_units(model: nn.Module, blocks: Collection[type | str] | None = None) -> dict[str, nn.Module]:
    """The units of a module by their names in it.

    A module that occurs under several names is found once.

    Args:
        model: any module.
        blocks: classes, or their names, whose modules are units. None: the elements of lists.

    Raises:
        ValueError: none of the classes occurs.

    Example:
        >>> class Net(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embed = nn.Embedding(9, 4)
        ...         self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))
        ...         self.head = nn.Linear(4, 9)
        >>> list(find_units(Net()))
        ['embed', 'blocks.0', 'blocks.1', 'head']
    """
    chosen = _elements_of_lists(model) if blocks is None else _of_classes(model, blocks)
    for module in model.modules():  # what torch.compile returned is called in place of what it wraps
        inside = torch_private.uncompiled(module)
        if inside is not module and id(inside) in chosen:
            chosen = {*chosen, id(module)} - {id(inside)}
    found = _Walk(model, chosen).units
    if blocks is None:
        _open_large(model, found)
    return found


class _Walk:
    """Collects the units below a module."""

    def __init__(self, model: nn.Module, chosen: set[int], name: str = "") -> None:
        self._chosen = chosen
        self._seen: set[int] = set()
        self.units: dict[str, nn.Module] = {}
        for child, module in model.named_children():
            self._visit(f"{name}.{child}" if name else child, module)

    def _visit(self, name: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        is_chosen = id(module) in self._chosen
        inside = any(id(each) in self._chosen for each in module.modules() if each is not module)
        if not is_chosen and (inside or not _is_called(module)):
            for child, each in module.named_children():
                self._visit(f"{name}.{child}", each)
        else:
            self.units[name] = module


def _is_called(module: nn.Module) -> bool:
    """Whether a module is called itself, in contrast to a list of modules, of which only the elements are."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _elements_of_lists(model: nn.Module) -> set[int]:
    """The ids of the outermost modules that stand in lists."""
    found: set[int] = set()
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside:
            continue
        elements = [each for each in module.children() if _is_called(each)] if isinstance(module, _LISTS) else []
        found |= {id(each) for each in elements}
        inside |= {id(each) for element in elements for each in element.modules()}
    return found


def _of_classes(model: nn.Module, blocks: Collection[type | str]) -> set[int]:
    kinds = tuple(each for each in blocks if isinstance(each, type))
    names = {each for each in blocks if isinstance(each, str)}
    found = {id(each) for each in model.modules() if isinstance(each, kinds) or type(each).__name__ in names}
    if not found:
        there = ", ".join(sorted({type(each).__name__ for each in model.modules()}))
        wanted = ", ".join(each if isinstance(each, str) else each.__name__ for each in blocks)
        raise ValueError(f"{type(model).__name__} has no module of the classes {wanted}; it has {there}")
    return found


def _open_large(model: nn.Module, units: dict[str, nn.Module]) -> None:
    """Replaces units that hold most of a model by the units inside."""
    whole = _size(model)
    while True:
        large = [name for name, unit in units.items() if _size(unit) > _SHARE * whole and _can_be_opened(unit)]
        if not large:
            return
        for name in large:
            inside = _Walk(units[name], set(), name).units
            items = [(key, unit) for key, unit in units.items() if key != name]
            place = list(units).index(name)
            units.clear()
            units.update([*items[:place], *inside.items(), *items[place:]])


def _can_be_opened(unit: nn.Module) -> bool:
    """Whether a unit has units inside, and no parameter of its own; PyTorch's own modules read their children's."""
    is_torch = type(unit).__module__.partition(".")[0] == "torch" and not isinstance(unit, _LISTS)
    return not is_torch and not unit._parameters and any(_is_called(each) for each in unit.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
