"""A model and the parts that a pipe made of it, which change together.

`take_over` gives the model the tensors of this process's parts, and `Following` keeps the parts as the model is now:
flags, attributes and tensors may change between two calls. Units share their attributes with the model's own modules.
The containers around them are copies in each part, which get what changes in the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from pipework import torch_private
from pipework.model.parts.skeleton import Unit, own_attributes, refers_to_module, share
from pipework.model.release import released_from

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor

    from pipework.model.parts.cut import Cuttable
    from pipework.model.parts.part import Part

_Key: TypeAlias = tuple[str, str]  # "attribute", "parameter" or "buffer", and the name
_State: TypeAlias = dict[_Key, tuple[Any, int]]

# Accelerate keeps the model's forward in the second one while another is in the first, as for mixed precision.
_FORWARDS = frozenset({"forward", "_original_forward"})


class Following:
    """The modules of a model and their counterparts in each part.

    Args:
        cuttable: the model as it was cut.
        parts: of the model, those of this process.
        is_whole: whether all parts are in this process.
    """

    def __init__(self, cuttable: Cuttable, parts: Iterable[Part], *, is_whole: bool) -> None:
        self._model = cuttable.model
        self._units = dict(cuttable.units)
        self._containers = dict(cuttable.containers)
        self._owns_hooks = cuttable.adapter.owns_hooks
        self._parts = list(parts)
        self._is_whole = is_whole
        self._seen = {name: _state(name, module) for name, module in self._containers.items()}
        self._classes = {name: type(module) for name, module in self._units.items()}
        self._children = {name: list(module._modules) for name, module in self._containers.items()}
        self._copies: list[tuple[str, list[nn.Module]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The attributes without the counterparts, which a copy of the model and its pipe finds anew."""
        return {**self.__dict__, "_copies": None}

    def update(self) -> None:
        """Gives the parts what the model has now.

        Raises:
            RuntimeError: the parts cannot follow: modules were added, replaced or given another forward or hooks, or a
                parameter that several processes have was replaced.
        """
        self._refuse_other_modules()
        if self._copies is None:
            self._copies = self._counterparts()
        for part in self._parts:
            part.training = self._model.training
        for name, copies in self._copies:
            module = self._containers[name]
            for each in copies:
                each.training = module.training
            now, seen = _state(name, module), self._seen[name]
            new = {
                key: value
                for key, (value, count) in now.items()
                if key not in seen or seen[key][0] is not value or seen[key][1] != count
            }
            if not new and now.keys() == seen.keys():
                continue
            self._refuse_new(module, new)
            for each in copies:
                _assign(each, new, seen.keys() - now.keys())
            self._seen[name] = now
            if not all(_takes_same_way(value, seen.get(key)) for key, value in new.items()):
                for part in self._parts:
                    part.watch_again()

    def _counterparts(self) -> list[tuple[str, list[nn.Module]]]:
        """By the name of a container, its copies in the parts. Units of a copied pipe share attributes again."""
        found: dict[str, list[nn.Module]] = {name: [] for name in self._containers}
        for part in self._parts:
            for name, module in part.get_submodule("model").named_modules():
                if name in found:
                    found[name].append(module)
                elif isinstance(module, Unit) and not module.is_elsewhere and name in self._units:
                    share(module, self._units[name])
        return list(found.items())

    def _refuse_new(self, module: nn.Module, new: Mapping[_Key, Any]) -> None:
        """Raises a RuntimeError for an assignment to a container that its copies cannot follow."""
        for (kind, name), value in new.items():
            which = f"{type(module).__name__}.{name}"
            if kind == "attribute" and name == "forward":
                raise _changed(f"{which} was replaced", where="to the module that the new forward calls")
            if kind == "attribute" and refers_to_module(value):
                raise _changed(f"{which} refers to a module and was assigned")
            if kind == "parameter" and not self._is_whole:
                raise _changed(f"the parameter {which}, which other processes may have, too, was assigned")

    def _refuse_other_modules(self) -> None:
        """Raises a RuntimeError if the model has other modules than when it was cut, or other hooks around units."""
        model = type(self._model).__name__
        for name, module in (*self._units.items(), *self._containers.items()):
            if _found(self._model, name) is not module:
                raise _changed(f"{name} of {model} was replaced by another module")
            kind = self._classes.get(name, type(module))
            if type(module) is not kind:
                now = type(module).__name__
                raise _changed(f"{name} of {model} became a {now} (it was a {kind.__name__}), as by a parametrization,")
        for name, container in self._containers.items():
            place = f"{name or 'the model itself'} ({type(container).__name__})"
            if list(container._modules) != self._children[name]:
                raise _changed(f"modules were added to {place}, or taken from it, or put in another order,")
            if name and torch_private.all_hooks(container) and not self._owns_hooks(container):
                raise _changed(f"{place} was given hooks, which each part would call,")


def _changed(what: str, where: str = "again") -> RuntimeError:
    return RuntimeError(
        f"{what} after the pipe was attached, which still runs the model as it was: take the pipe off with "
        f"`del model.forward`, and attach one {where}"
    )


def _found(model: nn.Module, name: str) -> Any:
    """A module by its name, or None."""
    found: Any = model
    for each in name.split(".") if name else ():
        found = None if found is None else found._modules.get(each)
    return found


def _state(container: str, module: nn.Module) -> _State:
    """The attributes, parameters and buffers of a container, each buffer with the number of its changes in place."""
    own = own_attributes(module)
    state: _State = {("attribute", name): (own[name], 0) for name in own if container or name not in _FORWARDS}
    state |= {("parameter", name): (value, 0) for name, value in module._parameters.items()}
    for name, value in module._buffers.items():
        state["buffer", name] = value, 0 if value is None or value.is_meta else torch_private.counted_version(value)
    return state


def _takes_same_way(value: Any, seen: tuple[Any, int] | None) -> bool:
    """Whether a forward cannot take another way for a new value, such as a weight that is warmed up in each step."""
    before = None if seen is None else seen[0]
    if value is before or (isinstance(value, float) and isinstance(before, float)):
        return True
    return isinstance(value, (int, str)) and type(value) is type(before) and value == before


def _assign(copied: nn.Module, new: Mapping[_Key, Any], gone: Iterable[_Key]) -> None:
    """Gives the copy of a container the values that are new, buffers on the device of the copy."""
    registries: dict[str, Any] = {
        "attribute": vars(copied), "buffer": copied._buffers, "parameter": copied._parameters
    }  # fmt: skip
    for kind, name in gone:
        registries[kind].pop(name, None)
    device = next((buffer.device for buffer in copied._buffers.values() if buffer is not None), None)
    for (kind, name), value in new.items():
        if kind == "parameter" and name in copied.__dict__["elsewhere"]:
            continue
        moves = kind == "buffer" and value is not None and device is not None
        registries[kind][name] = value.to(device) if moves else value


def take_over(containers: Mapping[str, nn.Module], here: Iterable[nn.Module], elsewhere: Iterable[nn.Module]) -> None:
    """Gives the model's containers the tensors that parts have now.

    Args:
        containers: of the model, by their names.
        here: the copies of the model in the parts of this process; if several have a tensor, that of the first counts.
        elsewhere: the copies in the parts of other processes, whose tensors have no values.
    """
    for copy in reversed((*here, *elsewhere)):
        for name, container in containers.items():
            own = copy.get_submodule(name)
            container._parameters.update({name: each for name, each in own._parameters.items() if each is not None})
            container._buffers.update({name: each for name, each in own._buffers.items() if each is not None})


def own_parameters(model: nn.Module, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
    """The parameters that this process trains, in place of `named_parameters` of a model with other processes' units.

    An optimizer of `model.parameters()` then has the parameters of this process alone.
    """
    every = type(model).named_parameters(model, *args, **kwargs)
    return ((name, parameter) for name, parameter in every if released_from(parameter) is None)
