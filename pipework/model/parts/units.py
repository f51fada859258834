"""The units of a module: the largest modules that are called as a whole, and at which it can be cut.

A container, whose own forward calls units, is cut; what its forward does between them is *glue*. A block of a list is
a unit, and so is any other module that holds no block: an embedding, a norm, a head. A module without parameters
(a pooling, an activation, a dropout) is a unit, too; it stays with the unit before it.
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
    for module in model.modules():  # a forward calls what torch.compile(block) returned, and not the block
        inside = torch_private.uncompiled(module)
        if inside is not module and id(inside) in chosen:
            chosen = {*chosen, id(module)} - {id(inside)}
    found: dict[str, nn.Module] = {}
    _collect(model, "", chosen, found, set())
    return _opened(model, found) if blocks is None else found


def _collect(parent: nn.Module, name: str, chosen: set[int], found: dict[str, nn.Module], seen: set[int]) -> None:
    """Adds the units below a module to those found.

    Args:
        parent: the module.
        name: of the module in the model.
        chosen: the ids of modules that are units.
        found: the units so far, by name.
        seen: the ids of the modules so far.
    """
    for child, module in parent.named_children():
        if id(module) in seen:
            continue
        seen.add(id(module))
        path = f"{name}.{child}" if name else child
        inside = any(id(each) in chosen for each in module.modules() if each is not module)
        if id(module) not in chosen and (inside or not _is_called(module)):
            _collect(module, path, chosen, found, seen)
        else:
            found[path] = module


def _is_called(module: nn.Module) -> bool:
    """Whether a forward calls the module itself; of an `nn.ModuleList` it calls the elements."""
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
    if isinstance(blocks, str | type):
        raise TypeError(f"blocks is {blocks!r}: wanted a list of classes, or of their names")
    kinds = tuple(each for each in blocks if isinstance(each, type))
    names = {each for each in blocks if isinstance(each, str)}
    found = {id(each) for each in model.modules() if isinstance(each, kinds) or type(each).__name__ in names}
    if not found:
        there = ", ".join(sorted({type(each).__name__ for each in model.modules()}))
        wanted = ", ".join(each if isinstance(each, str) else each.__name__ for each in blocks)
        raise ValueError(f"{type(model).__name__} has no module of the classes {wanted}; it has {there}")
    return found


def _opened(model: nn.Module, units: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The units, with those inside in place of each unit that holds most of the model."""
    opened: dict[str, nn.Module] = {}
    for name, unit in units.items():
        if _size(unit) > _SHARE * _size(model) and _can_be_opened(unit):
            inside: dict[str, nn.Module] = {}
            _collect(unit, name, set(), inside, set())
            opened |= _opened(model, inside)
        else:
            opened[name] = unit
    return opened


def _can_be_opened(unit: nn.Module) -> bool:
    """Whether a unit has units inside, and no parameter of its own; PyTorch's own modules read their children's."""
    is_torch = type(unit).__module__.partition(".")[0] == "torch" and not isinstance(unit, _LISTS)
    return not is_torch and not unit._parameters and any(_is_called(each) for each in unit.children())


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
