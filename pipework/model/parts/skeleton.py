"""The modules of a part: units that run here, absent units that run elsewhere, and the containers around them.

A unit here is a twin of the model's own module: another object, of a subclass of its class, with the same `__dict__`.
So parameters, buffers, hooks, flags and all that a forward keeps are the model's, and the model itself stays as it was,
and may be called without a pipe.
"""

from __future__ import annotations

import copy
import functools
import operator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pipework import torch_private
from pipework.model.parts import run as runs
from pipework.model.parts.leaves import reached

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Set

    from pipework.model.parts.adapter import Adapter


class Unit(nn.Module):
    """A unit that asks the run of its thread whether it computes.

    The class of a unit has two bases: this one, and the class of the model's own module.
    """

    unit_name: str
    is_elsewhere = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the run says that the unit returns; without a run, what the unit computes."""
        run = runs.current()
        if run is None or run.is_computing:
            return self.computed(*arguments, **keywords)
        return run.call(self, arguments, keywords)

    def computed(self, *arguments: Any, **keywords: Any) -> Any:
        """What a call of the module returns, with its hooks."""
        return super().__call__(*arguments, **keywords)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module's own forward returns; the glue may also call `unit.forward(...)` itself."""
        run = runs.current()
        if run is None or run.is_computing:
            return super().forward(*arguments, **keywords)
        return run.call(self, arguments, keywords)

    def plain_forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module's own forward returns, without hooks; a module of `torch.compile` runs uncompiled."""
        inside = torch_private.uncompiled(self)
        if inside is not self:
            return inside(*arguments, **keywords)
        own = self.__dict__.get("forward")
        return (super().forward if own is None else own)(*arguments, **keywords)

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Compiles the module as `nn.Module.compile` does, without the methods of `Unit`, which ask for a run."""
        kind = _class_of(self)
        module = kind.__new__(kind)
        share(module, self)
        module.compile(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Makes the class anew, since it stands in no module in which another process could find it."""
        return _named_unit, (_class_of(self), self.unit_name), _state_of(self)


def _of_module(function: Callable[..., Any]) -> Any:
    """The method of an `AbsentUnit` that applies a function such as `len` to the unit's module."""
    return lambda self, *arguments: function(self.__dict__["_elsewhere"], *arguments)


class AbsentUnit(Unit):
    """Stands in a part in place of a unit of another part. The forward around may still read the unit's attributes.

    Args:
        name: of the unit.
        module: the unit.
    """

    is_elsewhere = True

    def __init__(self, name: str, module: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(unit_name=name, _elsewhere=module)
        del self.__dict__["training"]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For `isinstance`: the class of the module."""
        return type(self.__dict__["_elsewhere"]) if "_elsewhere" in self.__dict__ else AbsentUnit

    def __getattr__(self, name: str) -> Any:
        """An attribute of the module that is elsewhere; in a run, tensors have no values."""
        if "_elsewhere" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.__dict__["_elsewhere"], name)
        run = runs.current()
        return value if run is None or not isinstance(value, Tensor) else run.absent(value)

    __bool__ = _of_module(bool)
    __len__ = _of_module(len)
    __iter__ = _of_module(iter)
    __getitem__ = _of_module(operator.getitem)
    __contains__ = _of_module(operator.contains)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In a run, tensors without values; else none, so that each parameter is found in one part."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, Any]]:
        """See `parameters`."""
        run = runs.current()
        if run is not None:
            for name, parameter in self.__dict__["_elsewhere"].named_parameters(*arguments, **keywords):
                yield name, run.absent(parameter)

    def train(self, mode: bool = True) -> Any:
        """Changes nothing: the flag `training` is that of the module elsewhere."""
        return self

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the unit returned in another part."""
        run = runs.current()
        if run is None:
            raise RuntimeError(f"{self.unit_name} runs in another part of the model")
        return run.call(self, arguments, keywords)

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentUnit:
        """An absent unit for the copy of the module, if both are copied together, else for the module itself."""
        module = self.__dict__["_elsewhere"]
        copied = AbsentUnit(self.unit_name, memo.get(id(module), module))
        copied.__dict__.update({name: hooks for name, hooks in vars(self).items() if name.endswith("_hooks")})
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Made from its name and module, as the base's way needs a subclass of the module's class."""
        return AbsentUnit, (self.unit_name, self.__dict__["_elsewhere"])


class Container(nn.Module):
    """A module around units, as a part has it: with the parameters of this part's units only.

    The forward may ask for the dtype or the device of the model. It gets that of the whole model, on the part's device.

    Attributes:
        whole: the module in the whole model.
        elsewhere: the names of the module's own parameters that only other parts read.
    """

    whole: AbsentUnit
    elsewhere: frozenset[str]

    def __getattr__(self, name: str) -> Any:
        """A parameter that only other parts read has no values here."""
        if name in self.__dict__.get("elsewhere", ()) and runs.current() is not None:
            return getattr(self.whole, name)
        return super().__getattr__(name)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        """In a run, tensors without values for all parameters of the module in the whole model."""
        return super().parameters(recurse) if runs.current() is None else self.whole.parameters(recurse)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """See `Unit.__reduce_ex__`."""
        return _container, (_class_of(self),), _state_of(self)


def twin_of(name: str, module: nn.Module) -> Unit:
    """The module as a unit of a part.

    Args:
        name: of the module in the model.
        module: a unit of the model.
    """
    unit = _named_unit(type(module), name)
    share(unit, module)
    return unit


def share(twin: nn.Module, module: nn.Module) -> None:
    """Gives a twin the attributes of a module, from now on."""
    object.__setattr__(twin, "__dict__", vars(module))


@functools.lru_cache(maxsize=1024)
def _subclass(role: Any, kind: Any) -> Any:
    """The class of a module in a role; named as the module's own, which forwards may read.

    All modules of a class have one: Python reads the attributes of objects of few classes several times faster.
    """
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own = {"__slots__": ("unit_name",)} if role is Unit else {}  # beside the `__dict__`, which is that of the module
    return type(kind.__name__, (role, kind), {**names, **own})


def _named_unit(kind: Any, name: str) -> Unit:
    cls = _subclass(Unit, kind)
    unit: Unit = cls.__new__(cls)
    object.__setattr__(unit, "unit_name", name)
    return unit


def _container(kind: Any) -> Any:
    cls = _subclass(Container, kind)
    return cls.__new__(cls)


def _state_of(module: nn.Module) -> Any:
    """What a copy gets: the attributes alone, where `object` would make a tuple of them and the slot `unit_name`."""
    # That of a parametrized module is an error, since its class cannot be found by name.
    is_own = type(module).__getstate__ is not object.__getstate__ and not is_parametrized(module)
    return module.__getstate__() if is_own else vars(module)  # type: ignore[no-untyped-call]


def _class_of(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1]


class Skeleton:
    """A model taken apart into units and the containers around them, of which it makes the copies for parts.

    Args:
        model: any module.
        units: of the model, by name.
        adapter: of the model's library.

    Attributes:
        containers: the modules around the units, by their names in the model.
        own_parameters: the parameters of containers, by their names in the model.
    """

    def __init__(self, model: nn.Module, units: Mapping[str, nn.Module], adapter: Adapter) -> None:
        self.model = model
        self.units = units
        self.adapter = adapter
        self._inside = [module for unit in units.values() for module in unit.modules()]
        inside = {id(module) for module in self._inside}
        self.containers = {name: module for name, module in model.named_modules() if id(module) not in inside}
        self.own_parameters = {
            _path(name, each): parameter
            for name, module in self.containers.items()
            for each, parameter in module._parameters.items()
            if parameter is not None
        }

    def copy(self, local: Set[str], *, shares: bool = True) -> tuple[nn.Module, dict[str, AbsentUnit]]:
        """The model around some of its units, and by the name of a unit what stands in place of it.

        Args:
            local: the names of the units, and of the parameters of containers, that the copy has.
            shares: whether the copy has the buffers of the model and the values of its attributes, or copies of them.
        """
        absent: dict[str, Any] = {
            name: self.adapter.stand_in(AbsentUnit(name, unit), unit) for name, unit in self.units.items()
        }
        memo: dict[int, object] = {id(each): each for each in self.adapter.shared(self.model)}
        memo |= {id(module): module for module in self._inside}  # a container may refer to a module in a unit
        memo |= {id(unit): twin_of(name, unit) if name in local else absent[name] for name, unit in self.units.items()}
        for module in self.model.modules():
            memo |= {id(parameter): parameter for parameter in module._parameters.values()}
        for module in self.containers.values() if shares else ():
            memo |= {id(buffer): buffer for buffer in module._buffers.values()}
            memo |= {id(value): value for value in own_attributes(module).values() if not refers_to_module(value)}
        hooks = [value for name, value in vars(self.model).items() if name.endswith("_hooks")]
        memo |= {id(each): type(each)() for each in hooks}  # a part calls the forward alone
        copies = {name: _container(type(module)) for name, module in self.containers.items()}
        memo |= {id(module): copies[name] for name, module in self.containers.items()}
        for name, module in self.containers.items():
            own = copies[name]
            own.__setstate__(copy.deepcopy(_state_of(module), memo))
            gone = {each for each in module._parameters if _path(name, each) in self.own_parameters.keys() - local}
            for each in gone:
                del own._parameters[each]
            own.__dict__.update(whole=AbsentUnit(name, module), elsewhere=frozenset(gone))
        return copies[""], absent


def _path(name: str, inside: str) -> str:
    """The name of what a module of a name has: `inside` of the model itself, else `name.inside`."""
    return f"{name}.{inside}" if name else inside


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module without those that every module has, such as its children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def refers_to_module(value: Any) -> bool:
    """Whether the value of an attribute refers to a module, so that each part needs a copy of the value.

    Example:
        >>> refers_to_module({"layers": [nn.ReLU()]}), refers_to_module({"sizes": [1, 2]})
        (True, False)
    """
    return any(isinstance(each, nn.Module) for each in reached(value, {}))
