"""Every private name of PyTorch that the package uses, each with the reason and with what replaces it if it is gone.

PyTorch may rename or remove a private name in any version. So the names are looked up here and nowhere else, once, when
this file is imported, and no lookup raises. A name that is gone has a fallback (a public way that is slower, or a
feature that is left out), or its use raises a RuntimeError with the version of PyTorch and the name.

Three kinds of private names stand in other files. They are public de facto, because PyTorch's documentation and every
library that walks through modules use them:

* the dictionaries `_modules`, `_parameters` and `_buffers` of `nn.Module`;
* the methods `_load_from_state_dict` of `nn.Module` and `_check_input_dim` of batch norms, which subclasses override;
* `_replace`, `_asdict` and the like, which are not PyTorch's but Python's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
import torch.library
import torch.overrides
from torch import Tensor, nn

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.autograd.graph import GradientEdge
    from torch.distributed.distributed_c10d import Store
    from torch.overrides import TorchFunctionMode
    from torch.utils import _pytree
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


for _module in ("_device", "_foreach_utils", "_python_dispatch", "_pytree"):
    with contextlib.suppress(ImportError):
        importlib.import_module(f"torch.utils.{_module}")  # `import torch` does not import all of them


def _find(owner: Any, path: str, instead: Any = None) -> Any:
    """The object under a private name, or `instead` if this version of PyTorch does not have it."""
    try:
        return operator.attrgetter(path)(owner)
    except AttributeError:
        return instead


def _has(owner: Any, path: str) -> bool:
    absent = object()
    return _find(owner, path, absent) is not absent


def _attribute(owner: Any, name: str, instead: Any) -> Callable[[Any], Any]:
    """A function that reads a private attribute of objects like `owner`; it gives `instead` if they have none."""
    return operator.attrgetter(name) if _has(owner, name) else lambda _: instead


class _Missing:
    """Stands for a name without a fallback: every use raises."""

    def __init__(self, path: str, purpose: str) -> None:
        self.__dict__["text"] = (
            f"PyTorch {torch.__version__} has no {path}, which pipework uses {purpose}: install a version of PyTorch "
            "that pipework supports, see docs/versions.md"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(self.text)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(self.text)


def _required(owner: Any, path: str, purpose: str) -> Any:
    found = _find(owner, path)
    return _Missing(f"{owner.__name__}.{path}", purpose) if found is None else found


# Autograd


def _run_with_checks(
    outputs: tuple[Any, ...], gradients: tuple[Tensor, ...], retain_graph: bool, create_graph: bool,
    inputs: tuple[Tensor, ...], allow_unreachable: bool, accumulate: bool,
) -> Any:  # fmt: skip
    if not accumulate:
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph, allow_unused=True)
    return torch.autograd.backward(outputs, gradients, retain_graph)


_run: Callable[..., Any] = _find(torch, "autograd.Variable._execution_engine.run_backward", _run_with_checks)
_retains_graph: Callable[[], bool] = _find(torch, "_C._autograd._get_current_graph_task_keep_graph", lambda: True)
_top_hooks: Callable[[bool], Any] = _find(torch, "_C._autograd._top_saved_tensors_default_hooks", lambda tracing: None)


def run_backward(outputs: tuple[Tensor | GradientEdge, ...], gradients: tuple[Tensor, ...], retain_graph: bool) -> None:
    """Accumulates the gradients of `outputs` into the leaves of their graph.

    Fallback: `torch.autograd.backward`, which does the same after 20 microseconds of checks.
    """
    # No graph of the gradients, no choice of inputs, unreachable leaves are allowed, gradients are accumulated.
    _run(outputs, gradients, retain_graph, False, (), True, True)


def gradients(output: GradientEdge, gradient: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`; the graph stays. Fallback: `torch.autograd.grad`, which checks more."""
    return _run((output,), (gradient,), True, False, inputs, True, False)  # type: ignore[no-any-return]


def retains_graph() -> bool:
    """Inside a node's backward: whether the caller asked for `retain_graph=True`. There is no public way to ask.

    Fallback: True, so that a step's memory is kept until its loss is dropped.
    """
    return _retains_graph()


accumulates_all: Callable[[], bool] = _find(
    torch, "autograd.Variable._execution_engine.is_checkpoint_valid", lambda: True
)
"""Inside a node's backward: whether all gradients are accumulated, and not those of some inputs only returned. PyTorch
asks it for reentrant checkpoints. Fallback: True."""


def saved_tensor_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """The calling thread's innermost `saved_tensors_hooks`. There is no public way to ask.

    Fallback: None, so that the caller's hooks do not see what the layers of a pipe save.
    """
    hooks = _top_hooks(True)
    return None if hooks is None else (hooks[0], hooks[1])


_count: Any = _required(Tensor, "_version", "to notice that a tensor was changed in place")

version: Callable[[Tensor], int] = _count if isinstance(_count, _Missing) else operator.attrgetter("_version")
"""How often a tensor was changed in place; raises a RuntimeError for tensors of inference mode. No fallback: without
it, wrong gradients would go unnoticed."""


class _View(torch.autograd.Function):
    """The same memory in another shape, and no view of the tensor for autograd."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.data.view(tuple(shape)).data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0].reshape(ctx.shape), None


unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = _find(torch, "ops.aten._unsafe_view.default", _View.apply)
"""The same memory in another shape. It is the one differentiable operator whose result is not a view, so in-place
operations are allowed on it also if the tensor is a leaf. Fallback: a function in Python, 9 microseconds slower."""


@functools.cache
def _saved_names(kind: Any) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name[1:].startswith("raw_saved_"))  # each operator has its own


def saved_by(node: Any) -> list[Any]:
    """What a node of a graph keeps for its backward: tensors, or what `saved_tensors_hooks` have made of them.

    It calls no hook and makes no tensor. Fallback: nothing, so that a note about memory counts less.
    """
    found: list[Any] = []
    for name in _saved_names(node.__class__):
        with contextlib.suppress(AttributeError, RuntimeError):  # it has been freed already
            saved = getattr(node, name)
            found += [each.data for each in (saved if isinstance(saved, tuple | list) else (saved,))]
    return found


# Subclasses of tensors, and what operators ask about them


_disable: Any = _find(torch, "_C.DisableTorchFunctionSubclass")

can_defer: Final[bool] = _disable is not None
"""Whether gradients of parameters can wait for a W. If `DisableTorchFunctionSubclass` is gone they cannot, and a
schedule with I and W computes them in I."""

without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = _disable or contextlib.nullcontext
"""A context in which operators do not call `__torch_function__`. PyTorch's notes on extending it use it, too."""

in_transform: Callable[[], bool] = _find(torch, "_C._are_functorch_transforms_active", lambda: True)
"""Whether a `torch.func` transform is running. Fallback: True, so that no gradient waits for a W."""


def _autocast_of_any_device() -> bool:
    accelerator = torch.accelerator.current_accelerator()
    types = {"cpu"} | ({accelerator.type} if accelerator is not None else set())
    return any(map(torch.is_autocast_enabled, types))


any_autocast: Callable[[], bool] = _find(torch, "_C._is_any_autocast_enabled", _autocast_of_any_device)
"""Whether autocast is on for any kind of device. Fallback: the public question, for one kind after the other."""

make_subclass: Callable[[type, Tensor, bool], Tensor] = _find(
    Tensor, "_make_subclass", lambda kind, plain, grad: plain.as_subclass(kind).requires_grad_(grad)
)
"""A tensor of a subclass with the memory and the version counter of another one. Fallback: `Tensor.as_subclass`."""

DispatchMode: Any = _find(torch, "utils._python_dispatch.TorchDispatchMode", contextlib.nullcontext)
"""The base of modes that see the operators below autograd. Fallback: a context that sees none."""


class ThreadDispatchMode(DispatchMode):  # type: ignore[misc]
    """A mode that several threads may enter and leave at the same time.

    PyTorch's own `with` also notes in variables of the process whether any mode is entered, and puts back what it found
    there. Of two threads one can put back what the other has written: then PyTorch takes all threads to be in a mode
    for good. Fallback: a context that sees no operators.
    """

    def __enter__(self) -> Self:
        if _KNOWS_MODES:
            torch.utils._python_dispatch._push_mode(self)
        return self

    def __exit__(self, *raised: object) -> None:
        if _KNOWS_MODES:
            torch.utils._python_dispatch._pop_mode()


def changes_arguments(operator: Any) -> bool:
    """Whether an operator below autograd writes to one of its arguments. Fallback: True.

    Example:
        >>> changes_arguments(torch.ops.aten.add_.Tensor), changes_arguments(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return bool(_find(operator, "_schema.is_mutable", True))


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator to which it writes. Fallback: none.

    Example:
        >>> written_arguments(torch.ops.aten.add_.Tensor, (torch.zeros(1), torch.ones(1)), {})
        [tensor([0.])]
    """
    found: list[Any] = []
    if changes_arguments(operator):
        for position, argument in enumerate(_find(operator, "_schema.arguments", ())):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[position] if position < len(args) else kwargs.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    return [each for each in found if isinstance(each, Tensor)]


def _find_fake_mode() -> Callable[[], object]:
    key = _find(torch, "_C._TorchDispatchModeKey.FAKE")
    mode: Callable[[Any], object] | None = _find(torch, "_C._get_dispatch_mode")
    return functools.partial(mode, key) if key is not None and mode is not None else lambda: None


_fake_mode: Final = _find_fake_mode()
"""The mode in which the calling thread traces with tensors that have no values; None: it does not."""


class TracedAsParameter(Tensor):
    """A tensor that `torch.compile` takes for a parameter, while it traces and in the code it makes.

    It knows tensors and parameters only. A module to which such a tensor is assigned must not take it for a parameter.
    Fallback: it is never one, and a compiled function outside of a module refuses it.
    """

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        asks = sys._getframe(2)  # the frame between is that of `isinstance`
        return _fake_mode() is not None or asks.f_globals.get("__name__", "").startswith("torch._functorch.")


is_wrapper_subclass: Callable[[object], bool] = _find(
    torch, "utils._python_dispatch.is_traceable_wrapper_subclass", lambda tensor: hasattr(tensor, "__tensor_flatten__")
)
"""Whether a tensor stands for other tensors. Fallback: whether it has the method by which PyTorch takes it apart."""

_hooks_of_tensor = _attribute(Tensor, "_backward_hooks", None)
_hooks_after_accumulation = _attribute(Tensor, "_post_accumulate_grad_hooks", None)


_knows_hooks = _has(Tensor, "_backward_hooks")
_OWN_HOOK: Final = -1  # PyTorch counts from 0


def add_last_hook(leaf: Tensor, hook: Callable[[Tensor], Tensor | None]) -> None:
    """Lets a backward call `hook` with a leaf's gradient, after all hooks that are registered on the leaf so far.

    Fallback: `Tensor.register_hook`, 2 microseconds slower.
    """
    if not _knows_hooks:
        leaf.pipework_hook = leaf.register_hook(hook)  # type: ignore[attr-defined, no-untyped-call]
    elif leaf._backward_hooks is None:
        leaf._backward_hooks = {_OWN_HOOK: hook}
    else:
        leaf._backward_hooks[_OWN_HOOK] = hook


def remove_last_hook(leaf: Tensor) -> None:
    """Removes what `add_last_hook` has added."""
    if not _knows_hooks:
        leaf.pipework_hook.remove()  # type: ignore[attr-defined]
    elif leaf._backward_hooks is not None and len(leaf._backward_hooks) > 1:
        del leaf._backward_hooks[_OWN_HOOK]
    else:
        leaf._backward_hooks = None


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks are registered on a tensor. There is no public way to ask. Fallback: False."""
    return bool(_hooks_of_tensor(tensor) or _hooks_after_accumulation(tensor))


def after_hooks(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient after the hooks that are registered on a leaf. Fallback: the gradient itself."""
    for hook in (_hooks_of_tensor(leaf) or {}).values() if gradient is not None else ():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


storage_key: Callable[[torch.UntypedStorage], int] = (
    operator.attrgetter("_cdata") if _has(torch.UntypedStorage, "_cdata") else id
)
"""A number that tells storages apart, also on the meta device, where none has an address. Fallback: `id`, which does so
while the storage's Python object lives."""


def memory_key(tensor: Tensor) -> int | None:
    """The `storage_key` of a tensor's memory; None: it has none of its own, as sparse and nested tensors.

    Example:
        >>> x = torch.zeros(3)
        >>> memory_key(x) == memory_key(x[1:]), memory_key(x.to_sparse())
        (True, None)
    """
    storage = _storage_of(tensor)
    return None if storage is None else storage_key(storage)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


_OWN_USES: Final = 2  # of the tensor, and of the storage's Python object
_uses_of_storage: Callable[[int], int] = _find(torch, "_C._storage_Use_Count", lambda storage: _OWN_USES + 1)
_knows_uses = _has(torch.UntypedStorage, "_cdata")


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor, in Python or inside of autograd, has the memory of this one, too.

    False for tensors without a memory of their own, as sparse and nested ones. Fallback: True.

    Example:
        >>> x = torch.zeros(3)
        >>> is_held_elsewhere(x), is_held_elsewhere(x[1:]), is_held_elsewhere(x.to_sparse())
        (False, True, False)
    """
    storage = _storage_of(tensor)  # its Python object must live while uses are counted
    return storage is not None and (not _knows_uses or _uses_of_storage(storage_key(storage)) > _OWN_USES)


viewed: Callable[[Tensor], Tensor | None] = _attribute(Tensor, "_base", None)
"""The tensor of which another one is a view; None: it is none. Fallback: None."""

ALIGNMENT: Final = 64
"""The memory of a new tensor on the CPU begins at a multiple of so many bytes. This is no name, but it is not public
either. If it changes, a result may differ in its last bit."""

sparse_values: Callable[[Tensor], Tensor] = _required(Tensor, "_values", "to write into a sparse gradient")
"""The values of a sparse tensor as they lie in memory; the public `values` refuses tensors that are not coalesced."""


# Modules


_FORWARD_HOOKS: Final = ("_forward_hooks", "_forward_pre_hooks")
_forward_hooks = _attribute(nn.Module(), "_forward_hooks", True)
_forward_pre_hooks = _attribute(nn.Module(), "_forward_pre_hooks", True)
_backward_hooks = _attribute(nn.Module(), "_backward_hooks", None)
_backward_pre_hooks = _attribute(nn.Module(), "_backward_pre_hooks", None)
_compiled_call = _attribute(nn.Module(), "_compiled_call_impl", None)


def forward_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that run after a module's forward. Fallback: none."""
    found = _forward_hooks(module)
    return list(found.values()) if isinstance(found, dict) else []


def may_have_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward. There is no public way to ask. Fallback: True."""
    return bool(_forward_hooks(module) or _forward_pre_hooks(module))


def all_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What runs when the module itself is called, beside its forward. Fallback: nothing."""
    groups = [*(getattr(module, name, None) for name in _FORWARD_HOOKS), _backward_hooks(module)]
    groups.append(_backward_pre_hooks(module))
    return [hook for group in groups if isinstance(group, dict) for hook in group.values()]


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens when the module itself is called, beside its forward. Fallback: False.

    Example:
        >>> module = nn.Sequential(nn.ReLU())
        >>> handle = module[0].register_full_backward_pre_hook(print)
        >>> has_hooks(module), has_hooks(module[0])
        (False, True)
    """
    return bool(all_hooks(module))


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` made what runs when the module is called.

    Fallback: only what `torch.compile` returns is recognised, by the name of its class.
    """
    return _compiled_call(module) is not None or type(module).__name__ == "OptimizedModule"


def run_uncompiled(copy: nn.Module) -> None:
    """Lets a shallow copy of a compiled module run itself: what was compiled runs the module that it was made of."""
    copy.__dict__.pop("_compiled_call_impl", None)
    inside = copy._modules.get(COMPILED_MODULE)
    if inside is not None and "forward" in copy.__dict__:
        copy.__dict__["forward"] = inside


COMPILED_MODULE: Final = "_orig_mod"
"""The attribute under which what `torch.compile(module)` returns has the module."""


_COMPILER: Final = "torch._dynamo"
"""The package that defines what `torch.compile(function)` returns: a wrapper, for PyTorch's own functions two."""


def uncompiled(function: Any) -> Any:
    """The module or function inside of what `torch.compile` returned, or one wrapper less. Fallback: what it returned.

    Example:
        >>> uncompiled(nn.functional.relu) is nn.functional.relu
        True
    """
    if getattr(function, "__globals__", {}).get("__name__", "").startswith(_COMPILER):
        return getattr(function, "__wrapped__", function)
    # Other objects may answer every name, as mocks do.
    return getattr(function, COMPILED_MODULE, function) if isinstance(function, nn.Module) else function


CALLS_OF_MODULES: Final = ("_wrapped_call_impl", "_call_impl")
"""The functions by which PyTorch calls a module, for tracebacks without them. Fallback: their frames are shown."""

RESETS: Final = ("reset_parameters", "_reset_parameters")
"""Methods that fill a module's parameters; nn.MultiheadAttention and nn.Transformer have the second. Fallback: these
two are refused on the meta device."""

_not_persistent = _attribute(nn.Module(), "_non_persistent_buffers_set", None)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of the module itself that its state dict has. Fallback: a state dict is made to see it."""
    left_out = _not_persistent(module)
    if left_out is None:
        left_out = module._buffers.keys() - {name for name, tensor in module._buffers.items() if tensor is None}
        left_out -= module.state_dict().keys()
    return {name: buffer for name, buffer in module._buffers.items() if name not in left_out}


_save: Any = _find(nn.Module, "_save_to_state_dict")


def saved_beside(module: nn.Module) -> dict[str, Tensor]:
    """What a module puts into a state dict by a method of its own, such as the scales of quantised weights.

    Only tensors that it has are given, and not those that it makes for each state dict, into which nothing can be
    loaded. Fallback: none.
    """
    if _save is None or type(module)._save_to_state_dict is _save:
        return {}
    saved: dict[str, Any] = {}
    again: dict[str, Any] = {}
    module._save_to_state_dict(saved, "", True)
    module._save_to_state_dict(again, "", True)
    return {
        name: value
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(again.get(name), Tensor)
        if memory_key(value) == memory_key(again[name])
    }


_apply: Any = _required(nn.Module, "_apply", "to move a layer of which a part lies on the meta device")


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter and buffer of a module by what a function makes of it, as `nn.Module.to` does.

    No fallback. Classes such as `nn.RNNBase` override the method, so it is looked up in the module.
    """
    apply: Any = _apply if isinstance(_apply, _Missing) else module._apply
    apply(function)


def copy_metadata(source: Any, target: Any) -> None:
    """Gives a state dict the versions of modules that another one has. Fallback: none, as in a plain dict."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None:
        target._metadata = metadata


_init_flat_weights: Callable[[nn.RNNBase], None] = _find(nn.RNNBase, "_init_flat_weights", lambda module: None)


@contextlib.contextmanager
def without_flat_weights(module: nn.Module) -> Iterator[None]:
    """Inside, recurrent modules have no weak references to their weights, with which `swap_tensors` refuses a tensor.

    Fallback: they keep them, and `swap_tensors` raises.
    """
    recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    for each in recurrent:
        each._flat_weight_refs = []
    try:
        yield
    finally:
        for each in recurrent:
            _init_flat_weights(each)


if TYPE_CHECKING:
    from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

    BatchNorm = _BatchNorm
    StatisticsNorm = _NormBase
else:
    BatchNorm = _find(nn, "modules.batchnorm._BatchNorm", nn.BatchNorm1d.__base__)
    """The class of all batch norms, also of the user's. Fallback: the class from which nn.BatchNorm1d derives."""
    StatisticsNorm = _find(nn, "modules.batchnorm._NormBase", BatchNorm)
    """The class of all norms that may track statistics. Fallback: batch norms, without instance norms."""


# Modes: objects of the user that see every operator of a thread


_KNOWS_MODES: Final = all(
    [
        *(_has(torch, f"overrides.{name}") for name in ("_get_current_function_mode_stack", "_push_mode", "_pop_mode")),
        _has(torch, "utils._python_dispatch._get_current_dispatch_mode_stack"),
        _has(torch, "utils._python_dispatch._push_mode"),
        _has(torch, "utils._python_dispatch._pop_mode"),
    ]
)
_DeviceContext: Any = _find(torch, "utils._device.DeviceContext")


_function_modes_here: Callable[[], int] = _find(torch, "_C._len_torch_function_stack", lambda: 1)
_dispatch_modes_here: Callable[[], int] = _find(torch, "_C._len_torch_dispatch_stack", lambda: 1)


def any_modes() -> bool:
    """Whether the calling thread is in any mode; a default device is one. Fallback: True, and they are looked at."""
    return bool(_function_modes_here() or _dispatch_modes_here())


_compiler_here: Callable[[], Any] = _find(torch, "_C._dynamo.eval_frame.get_eval_frame_callback", lambda: None)


def is_compiled_here() -> bool:
    """Whether `torch.compile` sees each function that the calling thread calls. Fallback: False."""
    return _compiler_here() is not None


def function_modes() -> list[TorchFunctionMode]:
    """The calling thread's modes, outermost first, but not a default device. Fallback: none, so workers have none."""
    if not _KNOWS_MODES:
        return []
    modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if type(mode) is not _DeviceContext]


def dispatch_modes() -> list[TorchDispatchMode]:
    """The same for modes that see the operators below autograd."""
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack() if _KNOWS_MODES else []


@contextlib.contextmanager
def modes_pushed(function: Iterable[TorchFunctionMode], dispatch: Iterable[TorchDispatchMode]) -> Iterator[None]:
    """Puts modes on the calling thread's stacks, without the `with` at which a counter would start from zero."""
    stacks = torch.utils._python_dispatch
    with contextlib.ExitStack() as stack:
        for function_mode in function:
            torch.overrides._push_mode(function_mode)  # type: ignore[no-untyped-call]
            stack.callback(torch.overrides._pop_mode)
        for mode in dispatch:
            stacks._push_mode(mode)
            # Most modes have no key of their own; those of PyTorch's infrastructure have.
            stack.callback(stacks._pop_mode, getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None))
        yield


# Kernels that draw random numbers


_TO_DRAW: Final = "to find the operators that draw random numbers"
_all_operators: Callable[[], list[str]] = _required(torch, "_C._dispatch_get_all_op_names", _TO_DRAW)
_has_kernel: Callable[[str, str], bool] = _required(torch, "_C._dispatch_has_kernel_for_dispatch_key", _TO_DRAW)
_schema: Callable[[str, str], Any] = _required(torch, "_C._get_schema", _TO_DRAW)


dispatch_key: Callable[[str], str] = _required(torch, "_C._dispatch_key_for_device", _TO_DRAW)
"""The key of the kernels for a type of device, such as "CUDA" for "cuda"."""


class GeneratorArgument(NamedTuple):
    """The generator among the arguments of an operator.

    Attributes:
        position: its place.
        keyword_only: whether it can only be given by keyword.
    """

    position: int
    keyword_only: bool


def random_operators(key: str) -> dict[str, GeneratorArgument | None]:
    """The operators with a kernel for a dispatch key that draw; every other random operator is made of these.

    The fused dropout of accelerators takes no generator: None. Fused attention, which takes none either and draws in
    few models, is left out. No fallback: a layer that may draw random numbers raises.
    """
    found: dict[str, GeneratorArgument | None] = {
        operator: GeneratorArgument(position, argument.kwarg_only)
        for operator in _all_operators()
        if operator.startswith("aten::") and _has_kernel(operator, key)
        for position, argument in enumerate(_schema(*operator.partition(".")[::2]).arguments)
        if argument.name == "generator"
    }
    return found | ({_FUSED_DROPOUT: None} if _has_kernel(_FUSED_DROPOUT, key) else {})


_FUSED_DROPOUT: Final = "aten::native_dropout"


def _find_random_() -> Callable[[Tensor], Any]:
    keys, key = _find(torch, "_C.DispatchKeySet"), _find(torch, "_C.DispatchKey.CPU")
    get_kernel = _find(torch, "library.get_kernel")
    if keys is None or key is None or get_kernel is None:
        return Tensor.random_
    return functools.partial(get_kernel("aten::random_", "CPU").call_boxed, keys(key))


random_on_cpu: Callable[[Tensor], Any] = _find_random_()
"""`Tensor.random_` on the CPU by PyTorch's own kernel, also while another one stands in its place. Fallback: the
method, some 10 microseconds slower then."""


def _dtensor_random() -> Any:
    return sys.modules.get("torch.distributed.tensor._random")


def may_trace_dtensor_draws() -> bool:
    """Whether DTensors are in use, and nothing is asked around their random operators. Fallback: False."""
    return getattr(_dtensor_random(), "_rng_tracker", False) is None


class _DTensorDraws:
    distribute_region_enabled = True

    def __init__(self, region: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
        self._region = region

    def _distribute_region(self, spec: Any, generator: object = None) -> contextlib.AbstractContextManager[None]:
        return self._region(spec)


def trace_dtensor_draws(region: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    """Has PyTorch run each random operator of a DTensor in a context, which a function makes of the DTensor's spec."""
    _dtensor_random()._rng_tracker = _DTensorDraws(region)


# Norms of many gradients


def _in_order(lists: list[list[Tensor]], with_indices: bool) -> dict[Any, tuple[list[list[Tensor]], list[int]]]:
    groups: dict[Any, tuple[list[list[Tensor]], list[int]]] = {}
    for place, tensor in enumerate(lists[0]):
        (tensors,), places = groups.setdefault((tensor.device, tensor.dtype), ([[]], []))
        tensors.append(tensor)
        places.append(place)
    return groups


_group: Callable[..., Any] = _find(torch, "utils._foreach_utils._group_tensors_by_device_and_dtype", _in_order)
_has_foreach: Callable[..., bool] = _find(
    torch, "utils._foreach_utils._has_foreach_support", lambda group, device: False
)
_foreach_norm: Callable[..., Any] | None = _find(torch, "_foreach_norm")


def grouped(tensors: Sequence[Tensor]) -> list[tuple[torch.device, torch.dtype, list[int]]]:
    """The places of the tensors of each device and dtype, in the order in which `clip_grad_norm_` adds them.

    Fallback: in the order in which they come first; the last bits of a norm over several dtypes may differ.
    """
    if not tensors:
        return []
    groups = _group([list(tensors)], with_indices=True)
    return [(device, dtype, [int(place) for place in places]) for (device, dtype), (_, places) in groups.items()]


def norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each, all of one device and dtype, by the operator that `clip_grad_norm_` takes.

    Fallback: one after the other.
    """
    if _foreach_norm is not None and _has_foreach(tensors, tensors[0].device):
        return list(_foreach_norm(tensors, norm_type))
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]


_foreach_mul: Callable[..., Any] | None = _find(torch, "_foreach_mul_")


def multiply_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies tensors of one device by a 0-dimensional one, in place; few kernels for all.

    Fallback: one after the other.
    """
    if _foreach_mul is not None:
        _foreach_mul(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor)


_clip_grad: Any = _find(torch, "nn.utils.clip_grad")
_CLIP: Final = "_clip_grads_with_norm_"


class _CheckedClip:
    """Stands for the function that `clip_grad_norm_` calls with the parameters once it has their norm."""

    def __init__(self, clip: Callable[..., Any]) -> None:
        self.clip = clip
        self.checks: list[Callable[[Iterable[Any]], None]] = []

    def __call__(self, parameters: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():  # a check cannot be traced, and reads no tensor
            for check in tuple(self.checks):
                check(parameters)
        return self.clip(parameters, *args, **kwargs)

    def remove(self, check: Callable[[Iterable[Any]], None]) -> None:
        self.checks.remove(check)
        if not self.checks and getattr(_clip_grad, _CLIP) is self:
            setattr(_clip_grad, _CLIP, self.clip)


def before_clip_grad_norm(check: Callable[[Iterable[Any]], None]) -> Callable[[], None]:
    """Calls a function with the parameters before `nn.utils.clip_grad_norm_` changes their gradients.

    There is no public way to see that call. Fallback: the function is never called.

    Returns:
        A function that ends this.
    """
    clip = _find(_clip_grad, _CLIP)
    if clip is None:
        return lambda: None
    if not isinstance(clip, _CheckedClip):
        clip = _CheckedClip(clip)
        setattr(_clip_grad, _CLIP, clip)
    clip.checks.append(check)
    return functools.partial(clip.remove, check)


# Devices


def spinning(device_module: Any) -> Callable[[int], None] | None:
    """Launches a kernel that does nothing for a number of cycles, and leaves room for other streams' kernels.

    Args:
        device_module: such as `torch.cuda`.

    Returns:
        None: the device has none; a long multiplication does instead.
    """
    found: Callable[[int], None] | None = getattr(device_module, "_sleep", None)
    return found


# Process groups


default_store: Callable[[], Store] = _find(
    dist,
    "distributed_c10d._get_default_store",
    lambda: dist.group.WORLD.get_group_store(),  # type: ignore[union-attr]
)
"""The store of the default process group. Fallback: `ProcessGroup.get_group_store`, which not every group has."""

_SHARES_DEVICES: Final = all(_has(dist, f"ProcessGroupGloo._Options.{name}") for name in ("_devices", "_timeout"))


def gloo_group(
    store: Store, rank: int, size: int, devices: list[Any], timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A gloo group that sends through network devices which it shares with other groups.

    Fallback: a group with devices, and so a thread, of its own.
    """
    kind: Any = dist.ProcessGroupGloo
    if not _SHARES_DEVICES:
        return kind(store, rank, size, timeout)  # type: ignore[no-any-return]
    options = kind._Options()
    options._devices, options._timeout = devices, timeout
    return kind(store, rank, size, options)  # type: ignore[no-any-return]


def transfer_together(group: Any, operation: str, tensors: Iterable[Tensor], peer: int) -> Any:
    """Starts transfers of a group of NCCL, "send" or "recv", at once; the result has a `wait()`.

    It warns of a transfer that is started by itself. `dist.batch_isend_irecv` takes groups of all of the job only. No
    fallback.
    """
    group._start_coalescing()
    try:
        for tensor in tensors:
            getattr(group, operation)([tensor], peer, 0)
    finally:
        work = group._end_coalescing()
    return work


abort_process_groups: Callable[[], None] = _required(dist, "distributed_c10d._abort_process_group", "to leave early")
"""`dist.destroy_process_group`, but what is under way ends, and no other rank is waited for. No fallback."""


# Nested values


if TYPE_CHECKING:
    pytree = _pytree
else:
    pytree = _required(torch, "utils._pytree", "to take nested values apart")
    """PyTorch's library of nested values, at which users and libraries register their classes. No fallback."""


def paths_of(tree: Any) -> list[str]:
    """Where the leaves of a nested value are, such as "['loss']". Fallback: nothing is said of it."""
    flatten, name = _find(pytree, "tree_flatten_with_path"), _find(pytree, "keystr")
    return [] if flatten is None or name is None else [name(path) for path, _ in flatten(tree)[0]]


def register_node(kind: type, flatten: Callable[[Any], Any], unflatten: Callable[[Any, Any], Any]) -> None:
    """Registers a class as a node of nested values; does nothing if `pytree` is gone, whose use raises."""
    if not isinstance(pytree, _Missing):
        pytree.register_pytree_node(kind, flatten, unflatten)
