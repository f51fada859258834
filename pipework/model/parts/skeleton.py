"""The modules of a part: units that run here, absent units that run elsewhere, and the containers around them.

A unit here is a twin of the model's own module: another object, of a subclass of its class, with the same `__dict__`.
So parameters, buffers, hooks, flags and all that a forward keeps are the model's, and the model itself stays as it was,
and may be called without a pipe.
"""

from __future__ import annotations

import copy
import functools
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from pipework import torch_private
from pipework.model.parts import run as runs
from pipework.model.parts.leaves import Absent

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from pipework.model.parts.adapter import Adapter


class Unit(nn.Module):
    """A unit that asks the run of its thread whether it computes; the other base of its class is that of the module."""

    unit_name: str
    is_elsewhere = False

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the run says that the unit gives; without a run, what it computes."""
        run = runs.current()
        if run is None or run.computing is not None:
            return self.computed(*arguments, **keywords)
        return run.call(self, arguments, keywords)

    def computed(self, *arguments: Any, **keywords: Any) -> Any:
        """What a call of the module gives, with its hooks."""
        return super().__call__(*arguments, **keywords)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module's own forward gives; the glue may also call it itself."""
        run = runs.current()
        if run is None or (run.computing is not None and not run.before):
            return super().forward(*arguments, **keywords)
        return run.forward(self, super().forward, arguments, keywords)

    def plain_forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the module's own forward gives, without its hooks; of what `torch.compile` returned, not compiled."""
        inside = torch_private.uncompiled(self)
        if inside is not self:
            return inside(*arguments, **keywords)
        own = self.__dict__.get("forward")
        return (super().forward if own is None else own)(*arguments, **keywords)

    @property
    def own_class(self) -> type[nn.Module]:
        """The class of the model's own module."""
        return _class_of(self)

    def same_unit(self, module: nn.Module) -> Unit:
        """Another module as this unit, such as a norm that replaces it."""
        return twin_of(self.unit_name, module)

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Compiles the module as `nn.Module.compile` does; what asks for the run of a thread stays outside."""
        kind = _class_of(self)
        module = kind.__new__(kind)
        share(module, self)
        module.compile(*arguments, **keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class is made anew, since no other process could find it by its name."""
        return _named_unit, (_class_of(self), self.unit_name), _state_of(self)


class AbsentUnit(Unit):
    """Stands where a unit of another part was. The forward around it may still read its attributes.

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

    def __bool__(self) -> bool:
        return bool(self.__dict__["_elsewhere"])

    def __len__(self) -> int:
        return len(self.__dict__["_elsewhere"])

    def __iter__(self) -> Any:
        return iter(self.__dict__["_elsewhere"])

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__["_elsewhere"][key]

    def __contains__(self, key: Any) -> bool:
        return key in self.__dict__["_elsewhere"]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In a run, tensors without values."""
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_parameters(self, *arguments: Any, **keywords: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """In a run, tensors without values."""
        run = runs.current()
        if run is not None:
            for name, parameter in self.__dict__["_elsewhere"].named_parameters(*arguments, **keywords):
                yield name, cast("nn.Parameter", run.absent(parameter))

    def train(self, mode: bool = True) -> Any:
        """Its flag is that of the module."""
        return self

    def replay(self, output: Any, arguments: tuple[Any, ...], keywords: Any) -> Any:
        """What the unit gave in another part, after the hooks that its library has put here."""
        if not torch_private.may_have_forward_hooks(self):
            return output
        run = runs.current()
        assert run is not None
        run.replayed = (output,)
        return self.computed(*arguments, **keywords)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the unit gave in another part."""
        run = runs.current()
        if run is None:
            raise RuntimeError(f"{self.unit_name} runs in another part of the model")
        replayed, run.replayed = run.replayed, None
        return run.call(self, arguments, keywords) if replayed is None else replayed[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentUnit:
        """For a copy of the module, if it is copied together with it."""
        module = self.__dict__["_elsewhere"]
        copied = AbsentUnit(self.unit_name, memo.get(id(module), module))
        copied.__dict__.update({name: hooks for name, hooks in vars(self).items() if name.endswith("_hooks")})
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """An absent unit is of no subclass of the module's class."""
        return AbsentUnit, (self.unit_name, self.__dict__["_elsewhere"])


class Container(nn.Module):
    """A module whose own forward calls units; its copy in a part has the parameters of local units only.

    The forward may ask for the dtype or the device of the model. It gets that of the whole model, on the part's device.

    Attributes:
        forms: of the parameters that the module has in the whole model.
        elsewhere: the module's own parameters that only other parts read.
    """

    forms: tuple[Absent, ...]
    elsewhere: dict[str, Absent]

    def __getattr__(self, name: str) -> Any:
        """A parameter that only other parts read has no values here."""
        elsewhere = self.__dict__.get("elsewhere")
        if elsewhere and name in elsewhere:
            run = runs.current()
            if run is not None:
                return run.absent(elsewhere[name])
        return super().__getattr__(name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """In a run, tensors without values for all parameters of the module in the whole model."""
        run = runs.current()
        if run is None:
            return super().parameters(recurse)
        return cast("Iterator[nn.Parameter]", run.parameters_of(self.forms))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """The class is made anew, since no other process could find it by its name."""
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


def become_container(copied: nn.Module, module: nn.Module) -> None:
    """Turns the copy of a module of the model into the container of a part."""
    note_forms(copied, module)
    kind: Any = type(copied)
    copied.__class__ = _subclass(Container, kind)


def note_forms(copied: nn.Module, module: nn.Module) -> None:
    """Notes the forms of all parameters of a module, of which its copy in a part has some."""
    copied.__dict__["forms"] = tuple([Absent.of(parameter) for parameter in module.parameters()])
    elsewhere = copied.__dict__.get("elsewhere", {})
    for name in elsewhere:
        parameter = module._parameters.get(name)
        if parameter is not None:
            elsewhere[name] = Absent.of(parameter)


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
    unit = cast("Unit", cls.__new__(cls))
    object.__setattr__(unit, "unit_name", name)
    return unit


def _container(kind: Any) -> nn.Module:
    cls = _subclass(Container, kind)
    return cast("nn.Module", cls.__new__(cls))


def _state_of(module: nn.Module) -> Any:
    """What a copy gets: without the slot, of which `object` would make a tuple."""
    is_own = type(module).__getstate__ is not object.__getstate__
    return module.__getstate__() if is_own else vars(module)  # type: ignore[no-untyped-call]


def _class_of(module: nn.Module) -> type[nn.Module]:
    return type(module).__bases__[1]


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

    def absent_units(self) -> dict[str, AbsentUnit]:
        """For each unit, what stands in place of it in another part."""
        made: dict[str, Any] = {
            name: self._adapter.stand_in(AbsentUnit(name, unit), unit) for name, unit in self.units.items()
        }
        return made

    def copy(
        self,
        local: Collection[str],
        reads: Callable[[str], bool],
        absent_units: Mapping[str, AbsentUnit],
        *,
        shares: bool = True,
    ) -> nn.Module:
        """The model around some of its units.

        Args:
            local: names of units that are to be there; absent units are in place of the others.
            reads: whether a parameter of a container is to be there, by its name.
            absent_units: by the name of a unit.
            shares: whether it has the same buffers and values of attributes as the model, and no copies of them.
        """
        memo: dict[int, object] = {id(each): each for each in self._adapter.shared(self._model)}
        for module in self._inside:  # a container may refer to a module in a unit
            memo[id(module)] = module
        for name, unit in self.units.items():
            memo[id(unit)] = twin_of(name, unit) if name in local else absent_units[name]
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
