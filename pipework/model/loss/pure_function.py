"""Whether a loss function can be called once more without anybody noticing.

Such a call must change nothing that outlives it, and print nothing. That is read from the function's byte code, and
from the values that it names. What is not known to be harmless is not.
"""

from __future__ import annotations

import builtins
import copy
import dis
import functools
import math
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, Final, Self

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.loss.inner_function import InnerFunction

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN: Final = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_TENSORS: Final = (Tensor, nn.Parameter)
_OPERATORS: Final = (nn.functional, torch.linalg, torch.special, torch.fft)
_MODULES: Final = (torch, nn, math, *_OPERATORS)
_CLASSES: Final = (*_PLAIN, Tensor, torch.finfo, torch.iinfo, torch.no_grad, torch.enable_grad, torch.autocast)
_FUNCTIONS: Final = (nn.functional.__name__, torch.functional.__name__)
_LOSSES: Final = (nn.modules.loss.__name__, nn.modules.distance.__name__)
_BUILTINS: Final = frozenset((
    "abs", "all", "any", "bool", "dict", "enumerate", "filter", "float", "int", "isinstance", "len", "list", "map",
    "max", "min", "pow", "range", "reversed", "round", "set", "slice", "sorted", "sum", "tuple", "zip",
))  # fmt: skip
# A value of one of these kinds may be in a local variable, and no attribute of theirs changes another one ...
_LOCAL: Final = (Tensor, torch.finfo, torch.Size, list, dict, str, float)
# ... but these: a tensor's version does not tell of them.
_UNSEEN: Final = frozenset((
    "apply_", "backward", "batch_norm", "data", "grad", "instance_norm", "map_", "numpy", "register_hook",
    "register_post_accumulate_grad_hook", "requires_grad_", "resize_", "retain_grad", "set_", "share_memory_",
    "storage", "untyped_storage",
))  # fmt: skip
_ATTRIBUTES: Final = frozenset(("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"))
_REFUSED: Final = ("STORE_", "DELETE_", "IMPORT_", "LOAD_NAME", "LOAD_BUILD_CLASS", "LOAD_FROM_DICT")
_NOT_RUN: Final = frozenset(("__init__", "__repr__", "__eq__", "__hash__", "__annotate__", "__annotate_func__"))


def is_plain(value: Any) -> bool:
    """Whether a value can be neither changed nor called."""
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain, value)))


class PureFunction:
    """A loss function of which a further call changes nothing; see `of`."""

    def __init__(self, inner: InnerFunction, tensors: list[Tensor]) -> None:
        self._inner = inner
        self._versions = [(tensor, torch_private.version(tensor)) for tensor in tensors]

    @classmethod
    def of(cls, function: Any, most_bytes: int) -> Self | None:
        """None if it is not known that nothing is changed.

        Args:
            function: a function, bound method or object. The latter two have a state, so they are copied.
            most_bytes: the most that may be copied.

        Example:
            >>> PureFunction.of(lambda output, target: (output - target).abs().mean(), 0) is None
            False
            >>> PureFunction.of(lambda output, target: print(output), 0) is None
            True
        """
        inner = InnerFunction.of(function)
        reading = _Reading()
        try:
            if inner.binds_positions or not reading.is_harmless(tuple(inner.keywords.values())):
                return None
            pure = (reading.method if isinstance(inner.function, MethodType) else reading.loss)(inner.function)
            if not pure or reading.copied_bytes > most_bytes:
                return None
            return cls(inner, reading.tensors)
        except Exception:  # an object may answer in any way
            return None

    @property
    def has_changed_tensors(self) -> bool:
        """Whether a tensor that the function names has been changed since this object was made."""
        return any(torch_private.version(tensor) != version for tensor, version in self._versions)

    def uncompiled(self) -> Callable[[Any, Any], Any]:
        """The function, not compiled, or a copy of the object."""
        function = self._inner.function
        if isinstance(function, MethodType):
            function = MethodType(function.__func__, copy.deepcopy(function.__self__))
        elif not isinstance(function, FunctionType | BuiltinFunctionType):
            function = copy.deepcopy(function)
        return functools.partial(function, **self._inner.keywords)


class _Reading:
    """What a function reads, as far as it has been looked at.

    Attributes:
        tensors: that functions name as global variables or of functions around them.
        copied_bytes: of the tensors of objects.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.copied_bytes = 0
        self._seen: set[int] = set()

    def is_harmless(self, value: Any, *, copied: bool = False) -> bool:
        """Whether a function that names the value, and passes the other rules, cannot change it unseen."""
        if type(value) in _TENSORS:
            if copied:
                self.copied_bytes += value.untyped_storage().nbytes()
            else:
                self.tensors.append(value)
            return True
        if _is_known(value):
            return True
        if type(value) is tuple or (copied and type(value) in {list, dict, set}):
            inside = (*value, *value.values()) if isinstance(value, dict) else value
            return all(self.is_harmless(each, copied=copied) for each in inside)
        if isinstance(value, FunctionType):
            return self.function(value, frozenset())
        return copied and self.instance(value)

    def loss(self, function: Any) -> bool:
        """Whether a function, or an object that is called, changes nothing, if the object is copied."""
        return self.is_harmless(function, copied=True)

    def method(self, method: MethodType) -> bool:
        """Whether a bound method changes nothing, if its object is copied."""
        function, instance = method.__func__, method.__self__
        own = self.attributes(instance)
        return isinstance(function, FunctionType) and self.function(function, own) and self.instance(instance)

    def function(self, function: FunctionType, own: frozenset[str]) -> bool:
        """Whether a function changes nothing, or only attributes of the object that it is a method of."""
        if id(function) in self._seen:
            return True
        self._seen.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        named = [cell.cell_contents for name, cell in cells if name != "__class__" or not own]
        named += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return self._code(function.__code__, function, own) and all(map(self.is_harmless, named))

    def _code(self, code: CodeType, function: FunctionType, own: frozenset[str]) -> bool:
        for step in dis.get_instructions(code):
            name = step.argval
            if step.opname == "LOAD_GLOBAL":
                right = self._global(name, function) or (name == "super" and bool(own))
            elif step.opname in _ATTRIBUTES:
                right = _is_harmless_attribute(name, own)
            elif step.opname == "STORE_ATTR":
                right = name in own - _UNSEEN
            elif step.opname == "STORE_DEREF":
                right = name not in function.__code__.co_freevars
            else:
                right = "_FAST" in step.opname or not step.opname.startswith(_REFUSED)
            if not right:
                return False
        return all(self._code(each, function, own) for each in code.co_consts if isinstance(each, CodeType))

    def _global(self, name: str, function: FunctionType) -> bool:
        if name in function.__globals__:
            return self.is_harmless(function.__globals__[name])
        kind = getattr(builtins, name, None)
        return name in _BUILTINS or (isinstance(kind, type) and issubclass(kind, Exception))

    def attributes(self, instance: Any) -> frozenset[str]:
        """The names that may be read of an object, and changed in its copy."""
        return frozenset([name for name in dir(instance) if not name.startswith("__")])

    def instance(self, instance: Any) -> bool:
        """Whether a copy of the object can be used in its place, and then no method changes anything else."""
        if id(instance) in self._seen:
            return True
        self._seen.add(id(instance))
        values = vars(instance)
        if isinstance(instance, nn.Module):
            if torch_private.has_hooks(instance) or torch_private.has_hooks(nn.Module()):
                return False
            values = {name: value for name, value in values.items() if name not in vars(nn.Module())}
            parts = (instance.named_parameters, instance.named_buffers)
            values.update((name, tensor) for part in parts for name, tensor in part(recurse=False))
            values.update(instance.named_children())
        own = self.attributes(instance)
        classes = [kind for kind in type(instance).__mro__ if not _is_of_torch(kind) and kind is not object]
        return (
            not isinstance(instance, type)
            and all(self._class(kind, own) for kind in classes)
            and all(self.is_harmless(value, copied=True) for value in values.values())
        )

    def _class(self, kind: type, own: frozenset[str]) -> bool:
        for name, value in vars(kind).items():
            inside = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if name in _NOT_RUN or (name.startswith("__") and not callable(inside)):
                continue
            if not (self.function(inside, own) if isinstance(inside, FunctionType) else self.is_harmless(inside)):
                return False
        return True


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules.")


def _is_known(value: Any) -> bool:
    """Whether a value is plain, or PyTorch's and without a state."""
    if isinstance(value, ModuleType):
        return value in _MODULES
    if isinstance(value, type):
        return value in _CLASSES or value.__module__ in _LOSSES
    if type(value).__module__ in _LOSSES:
        return (
            not torch_private.has_hooks(value)
            and not torch_private.has_hooks(nn.Module())
            and ("forward" not in vars(value))
        )
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return _is_operator(value)
    return is_plain(value)


def _is_operator(function: FunctionType | BuiltinFunctionType) -> bool:
    """Whether a function is one of PyTorch's or `math`'s that compute something, and set nothing."""
    if isinstance(function, FunctionType):  # by where its code is: wrappers have the names of what they wrap
        return function.__globals__.get("__name__") in _FUNCTIONS
    if function.__module__ == torch.__name__:
        return function.__self__ is None  # operators are static, what sets something is a function of a module
    return any(function is each for space in (math, *_OPERATORS) for each in vars(space).values())


def _is_harmless_attribute(name: str, own: frozenset[str]) -> bool:
    if name in _UNSEEN or name.startswith("__"):
        return name == "__name__"
    if name in own:
        return True
    if name.startswith("_"):
        return False
    return any(hasattr(kind, name) for kind in _LOCAL) or any(
        name in vars(space) and _is_known(vars(space)[name]) for space in _MODULES
    )
