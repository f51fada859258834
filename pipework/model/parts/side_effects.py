"""What a forward does beside returning a value: the dry run puts it back, or refuses it where parts would differ."""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework.model.parts.leaves import held_by, tensors_in
from pipework.model.parts.skeleton import own_attributes
from pipework.model.parts.trace import CannotCut

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

_PLAIN = (bool, int, float, complex, str, bytes)
_COLLECTIONS = (list, dict, set, OrderedDict)
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


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


def random_states_put_back(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """A context that puts back the default generators of PyTorch on the CPU and on a device."""
    has_own = device.type not in ("cpu", "meta")
    return torch.random.fork_rng([device] if has_own else [], device_type=device.type if has_own else "cpu")


@contextlib.contextmanager
def in_mode(modules: Iterable[nn.Module], *, training: bool) -> Iterator[None]:
    """Inside, modules have this flag `training`; `train()` and `eval()` may do more, such as merge adapters."""
    flags = [(vars(each), each.training) for each in modules if "training" in vars(each)]
    for attributes, _ in flags:
        attributes["training"] = training
    try:
        yield
    finally:
        for attributes, flag in flags:
            attributes["training"] = flag


class Attributes:
    """The attributes that modules, and all modules below them, have at present.

    Lists, dicts, sets and deques keep their identity and get back their elements, at any depth. Other objects that an
    attribute refers to are left alone, except what is beside the bytes of a parameter of another library's class.

    Args:
        modules: whose attributes may change.
        values: whether tensors that are no parameters get back their values, too.
    """

    def __init__(self, modules: Collection[nn.Module], *, values: bool) -> None:
        self._containers: list[tuple[Any, Any]] = []
        seen: set[int] = set()
        found: list[Tensor] = []
        for module in modules:
            for each in module.modules():
                _collect(vars(each), self._containers, found, seen)
        # In evaluation bitsandbytes repacks weights on the CPU, which rounds their scales.
        own = {id(each): each for module in modules for each in module.parameters() if type(each) is not nn.Parameter}
        stored = [each for each in own.values() if type(each).__torch_dispatch__ is _PLAIN_DISPATCH]
        self._stored = [(each, each.data) for each in stored]
        for attributes in map(vars, stored):
            beside = [vars(each) for each in attributes.values() if hasattr(each, "__dict__")]
            self._containers += [(each, dict(each)) for each in (attributes, *beside)]
        has_values = (each for each in found if not each.is_meta and type(each).__torch_dispatch__ is _PLAIN_DISPATCH)
        self._tensors = [(each, each.detach().clone()) for each in has_values] if values else []

    def put_back(self) -> None:
        """Gives the modules these attributes again."""
        for container, elements in self._containers:
            container.clear()
            (container.extend if isinstance(container, list | deque) else container.update)(elements)
        for parameter, data in self._stored:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        for tensor, before in self._tensors:
            if not torch.equal(tensor, before):  # an equal one is not written to: a graph may need it
                with torch.no_grad():
                    tensor.copy_(before)


@contextlib.contextmanager
def put_back(modules: Collection[nn.Module], *, values: bool) -> Iterator[None]:
    """Afterwards modules have the attributes that they had before; see `Attributes`.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> with put_back([layer], values=True):
        ...     _ = layer.eval().running_mean.fill_(5.0)
        >>> layer.training, layer.running_mean
        (True, tensor([0., 0.]))
    """
    before = Attributes(modules, values=values)
    try:
        yield
    finally:
        before.put_back()


@contextlib.contextmanager
def unchanged_by_errors(model: nn.Module) -> Iterator[Attributes]:
    """Gives the attributes that a model has before the block, which has them again if the block fails.

    Example:
        >>> layer = nn.ReLU()
        >>> with contextlib.suppress(ValueError), unchanged_by_errors(layer):
        ...     layer.inplace = True
        ...     raise ValueError
        >>> layer.inplace
        False
    """
    before = Attributes([model], values=False)
    try:
        yield before
    except BaseException:
        before.put_back()
        raise


def _collect(value: Any, containers: list[tuple[Any, Any]], tensors: list[Tensor], seen: set[int]) -> None:
    """Notes a container with a copy of it, and what it contains."""
    if id(value) in seen or isinstance(value, nn.Parameter | nn.Module):
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        tensors.append(value)
    elif type(value) in (*_COLLECTIONS, defaultdict, deque):
        containers.append((value, copy.copy(value)))
        for each in value.values() if isinstance(value, dict) else value:
            _collect(each, containers, tensors, seen)


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
        self._containers = [(name, module, _contents(module)) for name, module in containers.items()]

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
        for name, module, before in self._containers:
            for each, (numbers, tensors) in _contents(module).items():
                numbers_before, known = before.get(each, (None, []))
                has_other_numbers = None not in (numbers, numbers_before) and numbers != numbers_before
                new = [tensor for tensor in tensors if all(tensor is not other for other in known)]
                if has_other_numbers or any(map(follows, new)):
                    raise CannotCut(
                        f"{model}'s forward keeps a state in {f'self.{name}' if name else 'self'}.{each}, and each "
                        "part runs this forward and would keep its own: return it, compute it outside of the forward, "
                        "or let a unit keep it"
                    )


def _contents(module: nn.Module) -> dict[str, tuple[Any, list[Tensor]]]:
    """Of each attribute of a module and each buffer the numbers, texts and the like, and the tensors in it.

    None in place of numbers: the value is of another kind.
    """
    found: dict[str, tuple[Any, list[Tensor]]] = {}
    for name, value in (*own_attributes(module).items(), *module._buffers.items()):
        with contextlib.suppress(Exception):  # some configurations refuse to give an attribute
            found[name] = _numbers_in(value), held_by(value)
    return found


def _numbers_in(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if type(value) not in _COLLECTIONS:
        return None
    items = [len(value)] if isinstance(value, set) else [*value, *(value.values() if isinstance(value, dict) else ())]
    return [each if isinstance(each, _PLAIN) else type(each) for each in items]


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
