"""A model and the parts that a pipe made of it, which change together.

`take_over` gives the model the tensors of this process's parts, and `Following` keeps the parts as the model is now:
flags, attributes and tensors may change between two calls. Units share their dictionaries of tensors with the model's
own modules; the containers around them are copies in each part, so that what changes on one side is given to the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from pipework import torch_private
from pipework.model.parts.skeleton import Unit, note_forms, own_attributes, refers_to_module, share
from pipework.model.release import released_from

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import torch
    from torch import Tensor

    from pipework.model.parts.part import Part

# The second one is where Accelerate keeps the first when it puts another in its place, as for mixed precision.
_FORWARDS = frozenset({"forward", "_original_forward"})


class Following:
    """The modules of a model and their counterparts in each part.

    Args:
        model: of which these are the parts.
        units: of the model, by name.
        containers: of the model, by name.
        parts: layers that the model was cut into.
        owns_hooks: whether the hooks of a container belong to its library.
        is_whole: whether all parts are in this process.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Mapping[str, nn.Module],
        containers: Mapping[str, nn.Module],
        parts: Iterable[Part],
        owns_hooks: Callable[[nn.Module], bool],
        *,
        is_whole: bool,
    ) -> None:
        self._model = model
        self._parts = list(parts)
        self._units = dict(units)
        self._containers = dict(containers)
        self._owns_hooks = owns_hooks
        self._is_whole = is_whole
        self._seen = {name: _state(name, module) for name, module in self._containers.items()}
        self._versions = {name: _versions(module) for name, module in self._containers.items()}
        self._dtypes = self._present_dtypes()
        self._classes = {name: type(module) for name, module in self._units.items()}
        self._children = {name: list(module._modules) for name, module in self._containers.items()}
        self._copies: list[tuple[str, list[nn.Module]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without what a copy finds again."""
        return {**self.__dict__, "_copies": None}

    def update(self) -> None:
        """Gives the parts what the model has now.

        Raises:
            RuntimeError: the parts cannot follow: modules were added, replaced or given another forward or hooks, or a
                parameter that several processes have was replaced.
        """
        self._refuse_replaced()
        self._refuse_added()
        if self._copies is None:
            self._link()
        assert self._copies is not None
        self._follow_dtypes()
        for part in self._parts:
            part.training = self._model.training
        for name, copies in self._copies:
            module = self._containers[name]
            for each in copies:
                each.training = module.training
            now = _state(name, module)
            seen = self._seen[name]
            if now.keys() != seen.keys() or any(value is not seen[key] for key, value in now.items()):
                self._follow(module, copies, seen, now)
                self._seen[name] = now
                # Numbers that change with each step, such as a weight that is warmed up, choose no way.
                if any(not _is_same(value, seen.get(key)) for key, value in now.items()):
                    for part in self._parts:
                        part.watch_again()
            for each in copies:
                _follow_values(module, each, self._versions[name])

    def _present_dtypes(self) -> list[torch.dtype | None]:
        firsts = [next(unit.parameters(), None) for unit in self._units.values()]
        return [None if first is None else first.dtype for first in firsts]

    def _follow_dtypes(self) -> None:
        """A forward may ask for the dtype of parameters that are in other parts."""
        now = self._present_dtypes()
        if now == self._dtypes or not self._is_whole:
            return
        self._dtypes = now
        assert self._copies is not None
        for name, copies in self._copies:
            for each in copies:
                note_forms(each, self._containers[name])

    def _link(self) -> None:
        """Finds the counterparts; in a copy of the model and its pipe, twins share attributes again."""
        found: dict[str, list[nn.Module]] = {name: [] for name in self._containers}
        for part in self._parts:
            for name, module in part.get_submodule("model").named_modules():
                if name in found:
                    found[name].append(module)
                elif isinstance(module, Unit) and not module.is_elsewhere and name in self._units:
                    share(module, self._units[name])
        self._copies = list(found.items())

    def _follow(
        self, module: nn.Module, copies: list[nn.Module], seen: Mapping[Any, Any], now: Mapping[Any, Any]
    ) -> None:
        """Gives copies of a container the attributes, buffers and parameters that have been assigned since."""
        new = {key: value for key, value in now.items() if key not in seen or seen[key] is not value}
        for kind, name in new:
            which = f"{type(module).__name__}.{name}"
            if kind == "attribute" and (name == "forward" or refers_to_module(new[kind, name])):
                raise _changed(f"{which} refers to a module and was assigned")
            if kind == "parameter" and not self._is_whole:
                raise _changed(f"the parameter {which}, which other processes may have, too, was assigned")
        for each in copies:
            for kind, name in seen.keys() - now.keys():
                _registry(each, kind).pop(name, None)
            for (kind, name), value in new.items():
                if kind == "parameter" and name in each.__dict__.get("elsewhere", ()):
                    continue
                device = next((buffer.device for buffer in each._buffers.values() if buffer is not None), None)
                moves = kind == "buffer" and value is not None and device is not None
                _registry(each, kind)[name] = value.to(device) if moves else value

    def _refuse_replaced(self) -> None:
        for name, module in (*self._units.items(), *self._containers.items()):
            if _found(self._model, name) is not module:
                raise _changed(f"{name} of {type(self._model).__name__} was replaced by another module")
        for name, kind in self._classes.items():
            if type(self._units[name]) is not kind:
                raise _changed(
                    f"{name} of {type(self._model).__name__} became a {type(self._units[name]).__name__} (it was a "
                    f"{kind.__name__}), as by a parametrization,"
                )

    def _refuse_added(self) -> None:
        for name, container in self._containers.items():
            place = f"{name or 'the model itself'} ({type(container).__name__})"
            if list(container._modules) != self._children[name]:
                raise _changed(f"modules were added to {place}, or taken from it, or put in another order,")
            if name and torch_private.has_hooks(container) and not self._owns_hooks(container):
                raise _changed(
                    f"{place} was given hooks, which its forward in every part would call more often than once,"
                )


def _changed(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} after the pipe was attached, which still runs the model as it was: take the pipe off with "
        "`del model.forward`, and attach one again"
    )


def _found(model: nn.Module, name: str) -> Any:
    """A module by its name, or None."""
    found: Any = model
    for each in name.split(".") if name else ():
        found = found._modules.get(each)
        if found is None:
            return None
    return found


def _state(container: str, module: nn.Module) -> dict[tuple[str, str], Any]:
    """The attributes, buffers and parameters of a container."""
    own = own_attributes(module)
    state = {("attribute", name): own[name] for name in own if container or name not in _FORWARDS}
    state |= {("buffer", name): value for name, value in module._buffers.items()}
    return state | {("parameter", name): value for name, value in module._parameters.items()}


def _is_same(value: Any, before: Any) -> bool:
    if value is before or (isinstance(value, float) and isinstance(before, float)):
        return True
    return isinstance(value, (int, str)) and type(value) is type(before) and value == before


def _registry(module: nn.Module, kind: str) -> dict[str, Any]:
    return {"attribute": vars(module), "buffer": module._buffers, "parameter": module._parameters}[kind]


def _versions(module: nn.Module) -> dict[str, int]:
    return {name: torch_private.version(each) for name, each in module._buffers.items() if each is not None}


def _follow_values(module: nn.Module, copy: nn.Module, attached: Mapping[str, int]) -> None:
    """Buffers of a part on another device are copies: they get values that were written since.

    Args:
        module: a container of the model.
        copy: that of a part.
        attached: the versions of the buffers when the pipe was attached.
    """
    for name, buffer in module._buffers.items():
        own = copy._buffers.get(name)
        if buffer is None or own is None or own is buffer or buffer.is_meta or own.device == buffer.device:
            continue
        version = torch_private.version(buffer)
        versions = vars(copy).setdefault("_followed", {})
        if versions.setdefault(name, attached.get(name, version)) != version:
            own.copy_(buffer)
            versions[name] = version


def take_over(containers: Mapping[str, nn.Module], here: Iterable[nn.Module], elsewhere: Iterable[nn.Module]) -> None:
    """Gives the model's containers the tensors that parts have now.

    Args:
        containers: of the model, by their names.
        here: the copies of the model in the parts of this process; of a tensor that several have, the first one counts.
        elsewhere: the same of the parts of other processes, whose tensors have no values.
    """
    done: set[tuple[str, str]] = set()
    for copy in (*here, *elsewhere):
        for name, container in containers.items():
            own = copy.get_submodule(name)
            for kind in ("_parameters", "_buffers"):
                for each, tensor in getattr(own, kind).items():
                    if tensor is not None and (name, each) not in done:
                        done.add((name, each))
                        getattr(container, kind)[each] = tensor


class OwnParameters:
    """Takes the place of a model's `named_parameters` where other processes have some of its parameters.

    So an optimizer of `model.parameters()` has what this process trains.

    Args:
        model: whose units have been distributed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The parameters of this process."""
        every = type(self._model).named_parameters(self._model, prefix, recurse, remove_duplicate)
        return ((name, parameter) for name, parameter in every if released_from(parameter) is None)
