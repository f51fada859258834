"""Every private name of PyTorch that the package uses, each with its reason.

PyTorch may rename or remove a private name in any version. The versions that docs/versions.md lists have all that stand
here, so they are used without a second way. `require` looks for them first: for most when this file is imported, for
those of a feature that not every pipe has when the feature is used. A name that is gone raises an ImportError with the
version of PyTorch and the name.

Three kinds of private names stand in other files. They are public de facto, because PyTorch's documentation and every
library that walks through modules use them:

* the dictionaries `_modules`, `_parameters` and `_buffers` of `nn.Module`;
* the methods `_load_from_state_dict` of `nn.Module` and `_check_input_dim` of batch norms, which subclasses override;
* `_replace`, `_asdict` and the like, which are not PyTorch's but Python's.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import pkgutil
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    import datetime
    from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence

    from torch.autograd.graph import GradientEdge
    from torch.distributed.distributed_c10d import Store
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


def require(owner: Any, names: str) -> None:
    """Raises an ImportError with the first of some private names of PyTorch that the installed version does not have.

    Args:
        owner: whose attributes they are: an object, or the path of a module or class.
        names: with spaces between them.

    Example:
        >>> require("torch.Tensor", "_version _base")
    """
    for name in names.split():
        try:
            pkgutil.resolve_name(f"{owner}.{name}") if isinstance(owner, str) else operator.attrgetter(name)(owner)
        except (AttributeError, ImportError):
            path = owner if isinstance(owner, str) else getattr(owner, "__name__", type(owner).__name__)
            raise ImportError(
                f"PyTorch {torch.__version__} has no {path}.{name}, which pipework uses: install a version of "
                "PyTorch that docs/versions.md lists"
            ) from None


def _private(path: str) -> Any:
    """What a private path of PyTorch names; raises an ImportError as `require` does."""
    owner, _, name = path.rpartition(".")
    require(owner, name)
    return pkgutil.resolve_name(path)


require(
    "torch",
    "_C._storage_Use_Count _C._len_torch_function_stack _C._len_torch_dispatch_stack _C._dispatch_get_all_op_names "
    "_C._dispatch_has_kernel_for_dispatch_key _C._get_schema _foreach_norm ops.aten.add.Tensor._schema "
    "utils._foreach_utils._group_tensors_by_device_and_dtype utils._foreach_utils._has_foreach_support "
    "utils._python_dispatch._push_mode utils._python_dispatch._pop_mode utils._device.DeviceContext "
    "overrides._get_current_function_mode_stack overrides._push_mode overrides._pop_mode UntypedStorage._cdata "
    "Tensor._version Tensor._backward_hooks Tensor._post_accumulate_grad_hooks Tensor._base "
    "_neg_view nn.modules.batchnorm._BatchNorm nn.modules.batchnorm._NormBase nn.modules.module._has_any_global_hook",
)
require("torch.utils._pytree", "SUPPORTED_NODES TreeSpec is_namedtuple_class register_pytree_node tree_flatten")
require("torch.utils._pytree", "tree_leaves tree_structure tree_unflatten")
require(nn.Module(), "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _compiled_call_impl")
require(nn.Module(), "_non_persistent_buffers_set _save_to_state_dict _apply")


# Autograd


_engine: Final = _private("torch.autograd.Variable._execution_engine")


# No graph of the gradients, no choice of inputs, unreachable leaves are allowed, gradients are accumulated.
run_backward: Callable[[tuple[Tensor | GradientEdge, ...], tuple[Tensor, ...], bool], None] = functools.partial(
    _engine.run_backward, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True
)
"""Of roots, their gradients, and whether the graph is retained: accumulates the gradients into the leaves of the graph.

It is what `torch.autograd.backward` calls, after 20 microseconds of checks."""


def gradients(output: GradientEdge, gradient: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """The gradients of `inputs`; the graph stays. It is what `torch.autograd.grad` calls."""
    return _engine.run_backward((output,), (gradient,), True, False, inputs, True, False)  # type: ignore[no-any-return]


retains_graph: Callable[[], bool] = _private("torch._C._autograd._get_current_graph_task_keep_graph")
"""Inside a node's backward: whether the caller asked for `retain_graph=True`. There is no public way to ask."""

accumulates_all: Callable[[], bool] = _engine.is_checkpoint_valid
"""Inside a node's backward: whether all gradients are accumulated, and not those of some inputs only returned. PyTorch
asks it for reentrant checkpoints."""

saved_tensor_hooks: Callable[[], tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None] = functools.partial(
    _private("torch._C._autograd._top_saved_tensors_default_hooks"), True
)
"""The calling thread's innermost `saved_tensors_hooks`. There is no public way to ask."""

version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""How often a tensor was changed in place; raises a RuntimeError for tensors of inference mode."""


def counted_version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; 0 in inference mode, where PyTorch does not count."""
    return 0 if tensor.is_inference() else version(tensor)


unsafe_view: Callable[[Tensor, Sequence[int]], Tensor] = _private("torch.ops.aten._unsafe_view.default")
"""The same memory in another shape. It is the one differentiable operator whose result is not a view, so in-place
operations are allowed on it also if the tensor is a leaf."""

with torch.inference_mode(False), torch.enable_grad():
    _cube = torch.zeros(1, 1, 1, device="cpu", requires_grad=True)
    LINEAR_IS_VIEW: Final = nn.functional.linear(_cube, _cube[0], _cube[0, 0])._base is not None
"""Whether a linear layer with a bias returns a view of a matrix for an input of more dimensions, as until PyTorch 2.14:
an in-place operation on it then replaces its node, and a hook of it is lost."""


# Subclasses of tensors, and what operators ask about them


without_torch_function: Callable[[], contextlib.AbstractContextManager[None]] = _private(
    "torch._C.DisableTorchFunctionSubclass"
)
"""A context in which operators do not call `__torch_function__`. PyTorch's notes on extending it use it, too."""

reads_number: Any = _private("torch.ops.aten._local_scalar_dense.default")
"""The operator by which Python reads the number in a tensor."""

in_transform: Callable[[], bool] = _private("torch._C._are_functorch_transforms_active")
"""Whether a `torch.func` transform is running."""

any_autocast: Callable[[], bool] = _private("torch._C._is_any_autocast_enabled")
"""Whether autocast is on for any kind of device."""

make_subclass: Callable[[type, Tensor, bool], Tensor] = _private("torch.Tensor._make_subclass")
"""A tensor of a subclass with the memory and the version counter of another one."""

DispatchMode: Any = _private("torch.utils._python_dispatch.TorchDispatchMode")
"""The base of modes that see the operators below autograd."""


class ThreadDispatchMode(DispatchMode):  # type: ignore[misc]
    """A mode that several threads may enter and leave at the same time.

    PyTorch's own `with` also notes in variables of the process whether any mode is entered, and puts back what it found
    there. Of two threads one can put back what the other has written: then PyTorch takes all threads to be in a mode
    for good.
    """

    def __enter__(self) -> Self:
        torch.utils._python_dispatch._push_mode(self)
        return self

    def __exit__(self, *raised: object) -> None:
        torch.utils._python_dispatch._pop_mode()


def changes_arguments(operator: Any) -> bool:
    """Whether an operator below autograd writes to one of its arguments.

    Example:
        >>> changes_arguments(torch.ops.aten.add_.Tensor), changes_arguments(torch.ops.aten.add.Tensor)
        (True, False)
    """
    return bool(operator._schema.is_mutable)


def arguments_by_name(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of an operator by their names, without those that have their default.

    Example:
        >>> arguments_by_name(torch.ops.aten.random_.to, (torch.ones(1), 4), {"generator": None})
        {'self': tensor([1.]), 'to': 4, 'generator': None}
    """
    names = (each.name for each in operator._schema.arguments)
    return {**dict(zip(names, args, strict=False)), **kwargs}


def written_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an operator to which it writes.

    Example:
        >>> written_arguments(torch.ops.aten.add_.Tensor, (torch.zeros(1), torch.ones(1)), {})
        [tensor([0.])]
    """
    found: list[Any] = []
    if changes_arguments(operator):
        named = arguments_by_name(operator, args, kwargs)
        for argument in operator._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = named.get(argument.name)
                found += given if isinstance(given, list | tuple) else [given]
    return [each for each in found if isinstance(each, Tensor)]


_fake_mode: Final[Callable[[], object]] = functools.partial(
    _private("torch._C._get_dispatch_mode"), _private("torch._C._TorchDispatchModeKey.FAKE")
)
"""The mode in which the calling thread traces with tensors that have no values; None: it does not."""


class TracedAsParameter(Tensor):
    """A tensor that `torch.compile` takes for a parameter, while it traces and in the code it makes.

    It knows tensors and parameters only. A module to which such a tensor is assigned must not take it for a parameter.
    """

    @property
    def _is_param(self) -> bool:  # type: ignore[override]
        asks = sys._getframe(2)  # the frame between is that of `isinstance`
        return _fake_mode() is not None or asks.f_globals.get("__name__", "").startswith("torch._functorch.")


is_wrapper_subclass: Callable[[object], bool] = _private("torch.utils._python_dispatch.is_traceable_wrapper_subclass")
"""Whether a tensor stands for other tensors."""


def has_tensor_hooks(tensor: Tensor) -> bool:
    """Whether hooks are registered on a tensor. There is no public way to ask."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def after_hooks(leaf: Tensor, gradient: Tensor | None) -> Tensor | None:
    """A gradient after the hooks that are registered on a leaf."""
    if gradient is not None:
        for hook in (leaf._backward_hooks or {}).values():
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
    return gradient


storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number that tells storages apart, also on the meta device, where none has an address."""


def memory_key(tensor: Tensor) -> int | None:
    """The `storage_key` of a tensor's memory; None: it has none of its own, as sparse and nested tensors.

    Example:
        >>> x = torch.zeros(3)
        >>> memory_key(x) == memory_key(x[1:]), memory_key(x.to_sparse())
        (True, None)
    """
    storage = storage_of(tensor)
    return None if storage is None else storage_key(storage)


def memory_of(tensor: Tensor) -> int:
    """A number that is equal for tensors that share memory: a change of one may change another one with the same."""
    key = memory_key(tensor)
    return id(tensor) if key is None else key


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a tensor; None: it has none of its own, as sparse and nested tensors."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


_OWN_USES: Final = 2  # of the tensor, and of the storage's Python object


def is_held_elsewhere(tensor: Tensor) -> bool:
    """Whether another tensor, in Python or inside of autograd, has the memory of this one, too.

    False for tensors without a memory of their own, as sparse and nested ones.

    Example:
        >>> x = torch.zeros(3)
        >>> is_held_elsewhere(x), is_held_elsewhere(x[1:]), is_held_elsewhere(x.to_sparse())
        (False, True, False)
    """
    storage = storage_of(tensor)  # its Python object must live while uses are counted
    return storage is not None and torch._C._storage_Use_Count(storage._cdata) > _OWN_USES


def is_only_use(storage: torch.UntypedStorage) -> bool:
    """Whether no tensor has a memory, but only this Python object, of which PyTorch makes one for each storage.

    Several may refer to the object, such as the packed tensors of two graphs: these do not count.

    Example:
        >>> x = torch.zeros(3)
        >>> storage = x.untyped_storage()
        >>> before = is_only_use(storage)
        >>> del x
        >>> before, is_only_use(storage)
        (False, True)
    """
    return bool(torch._C._storage_Use_Count(storage._cdata) < _OWN_USES)


class MemoryView(NamedTuple):
    """How a tensor reads a memory.

    Example:
        >>> x = torch.arange(6).view(2, 3)[:, 1:]
        >>> MemoryView.of(x).on(x.untyped_storage(), x.new_empty(0))
        tensor([[1, 2],
                [4, 5]])
    """

    offset: Any  # an integer
    shape: torch.Size
    strides: tuple[int, ...]
    is_conj: bool  # bits of a tensor, and not of its memory
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> MemoryView:
        """The view of a tensor that is strided."""
        offset, shape, strides = tensor.storage_offset(), tensor.shape, tensor.stride()
        return cls(offset, shape, strides, tensor.is_conj(), tensor.is_neg())

    def on(self, storage: torch.UntypedStorage, empty: Tensor) -> Tensor:
        """A tensor that reads this memory so; it is made of an empty one."""
        same = empty.data.set_(storage, self.offset, self.shape, self.strides)
        same = same.conj() if self.is_conj else same
        return torch._neg_view(same) if self.is_neg else same


def unowned(tensor: Tensor) -> Tensor:
    """A tensor with the memory of another one, which is freed with the other one all the same.

    Example:
        >>> x = torch.arange(3)
        >>> y = unowned(x[1:])
        >>> y.tolist(), is_held_elsewhere(x)
        ([1, 2], False)
    """
    require("torch", "_C._construct_storage_from_data_pointer")
    own = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(own.data_ptr(), tensor.device, own.nbytes())
    return MemoryView.of(tensor).on(storage, torch.empty(0, dtype=tensor.dtype, device=tensor.device))  # type: ignore[arg-type]


viewed: Callable[[Tensor], Tensor | None] = operator.attrgetter("_base")
"""The tensor of which another one is a view; None: it is none."""

ALIGNMENT: Final = 64
"""The memory of a new tensor on the CPU begins at a multiple of so many bytes. This is no name, but it is not public
either. If it changes, a result may differ in its last bit."""

sparse_values: Callable[[Tensor], Tensor] = _private("torch.Tensor._values")
"""The values of a sparse tensor as they lie in memory; the public `values` refuses tensors that are not coalesced."""


# Modules


def forward_hooks(module: nn.Module) -> MutableMapping[int, Callable[..., Any]]:
    """The hooks that run after a module's forward, by the number of their handle; the module's own dictionary."""
    return module._forward_hooks


def may_have_forward_hooks(module: nn.Module) -> bool:
    """Whether hooks run before or after a module's forward. There is no public way to ask."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def all_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """What happens when the module itself is called, beside its forward.

    Example:
        >>> module = nn.Sequential(nn.ReLU())
        >>> handle = module[0].register_full_backward_pre_hook(print)
        >>> len(all_hooks(module)), len(all_hooks(module[0]))
        (0, 1)
    """
    groups: tuple[Mapping[int, Callable[..., Any]], ...] = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    )  # fmt: skip
    return [hook for group in groups for hook in group.values()]


def any_global_hooks() -> bool:
    """Whether there are hooks on the calls of all modules."""
    return bool(nn.modules.module._has_any_global_hook())  # type: ignore[no-untyped-call]


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` or `module.compile()` made what runs when the module is called."""
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


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
    """The module or function inside of what `torch.compile` returned, or one wrapper less.

    Example:
        >>> uncompiled(nn.functional.relu) is nn.functional.relu
        True
    """
    if getattr(function, "__globals__", {}).get("__name__", "").startswith(_COMPILER):
        return getattr(function, "__wrapped__", function)
    # Other objects may answer every name, as mocks do.
    return getattr(function, COMPILED_MODULE, function) if isinstance(function, nn.Module) else function


CALLS_OF_MODULES: Final = ("_wrapped_call_impl", "_call_impl")
"""The functions by which PyTorch calls a module, for tracebacks without them."""

RESETS: Final = ("reset_parameters", "_reset_parameters")
"""Methods that fill a module's parameters; nn.MultiheadAttention and nn.Transformer have the second."""


def persistent_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """The buffers of the module itself that its state dict has."""
    left_out = module._non_persistent_buffers_set
    return {name: buffer for name, buffer in module._buffers.items() if name not in left_out}


def saved_beside(module: nn.Module) -> dict[str, Tensor]:
    """What a module puts into a state dict by a method of its own, such as the scales of quantised weights.

    Only tensors that it has are given, and not those that it makes for each state dict, into which nothing can be
    loaded.
    """
    if type(module)._save_to_state_dict is nn.Module._save_to_state_dict:
        return {}
    saved, again = dict[str, Any](), dict[str, Any]()
    module._save_to_state_dict(saved, "", True)
    module._save_to_state_dict(again, "", True)
    return {
        name: value
        for name, value in saved.items()
        if isinstance(value, Tensor) and isinstance(again.get(name), Tensor)
        if memory_key(value) == memory_key(again[name])
    }


def apply_to_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Replaces every parameter and buffer of a module by what a function makes of it, as `nn.Module.to` does.

    Classes such as `nn.RNNBase` override the method, so it is looked up in the module.
    """
    module._apply(function)  # type: ignore[no-untyped-call]


def copy_metadata(source: Any, target: Any) -> None:
    """Gives a state dict the versions of modules that another one has; a plain dict has none."""
    target._metadata = getattr(source, "_metadata", None)


@contextlib.contextmanager
def without_flat_weights(module: nn.Module) -> Iterator[None]:
    """Inside, recurrent modules have no weak references to their weights, for which `swap_tensors` refuses them."""
    recurrent = [each for each in module.modules() if isinstance(each, nn.RNNBase)]
    for each in recurrent:
        require(each, "_flat_weight_refs _init_flat_weights")
        each._flat_weight_refs = []
    try:
        yield
    finally:
        for each in recurrent:
            each._init_flat_weights()


BatchNorm = nn.modules.batchnorm._BatchNorm
"""The class of all batch norms, also of the user's."""

StatisticsNorm = nn.modules.batchnorm._NormBase
"""The class of all norms that may track statistics."""


# Graphs of CUDA


_VERSION: Final = tuple([int(part) for part in torch.__version__.split(".")[:2]])


def register_states(graph: torch.cuda.CUDAGraph, states: Iterable[torch.Generator]) -> None:
    """Before a capture: the graph may draw from these states. From PyTorch 2.14 on a graph finds them by itself."""
    if _VERSION < (2, 14):
        for state in states:
            graph.register_generator_state(state)


def clear_workspaces() -> None:
    """The next product on each stream allocates memory for cuBLAS anew."""
    require("torch", "_C._cuda_clearCublasWorkspaces")
    torch._C._cuda_clearCublasWorkspaces()


def abort_capture(graph: torch.cuda.CUDAGraph, device: torch.device, pool: torch.cuda.MemPool, uses: int) -> None:
    """Ends a capture in which something has failed, so that the allocator and generators work as usual afterwards.

    Neither the graph nor the pool can be used again. Up to PyTorch 2.12 `capture_end` leaves the allocator and the
    generator in the capture if that is invalid; a further capture, which is empty, takes the generator out of it. Up to
    2.13 the graph keeps the pool for good.

    Args:
        graph: that was to be captured.
        device: of the pool.
        pool: of the graph.
        uses: of the pool, before the capture.
    """
    try:
        graph.capture_end()
        return
    except RuntimeError:  # what has failed is why
        require("torch", "_C._cuda_endAllocateToPool _C._cuda_releasePool")
    graph.reset()
    with contextlib.suppress(RuntimeError):  # newer versions have done so
        torch._C._cuda_endAllocateToPool(device.index, pool.id)
    if pool.use_count() > uses:
        torch._C._cuda_releasePool(device.index, pool.id)
    another = torch.cuda.CUDAGraph()
    another.capture_begin(capture_error_mode="thread_local")
    another.capture_end()


# Modes: objects of the user that see every operator of a thread


def any_modes() -> bool:
    """Whether the calling thread is in any mode; a default device is one."""
    return bool(torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack())


_dispatch_modes: Callable[[], list[Any]]
_dispatch_modes = _private("torch.utils._python_dispatch._get_current_dispatch_mode_stack")


def modes() -> list[Any]:
    """The calling thread's modes, outermost first, but not a default device.

    First those that see calls of functions, then those that see the operators below autograd.
    """
    functions = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in functions if type(mode) is not torch.utils._device.DeviceContext] + _dispatch_modes()


@contextlib.contextmanager
def modes_pushed(pushed: Iterable[Any]) -> Iterator[None]:
    """Puts modes on the calling thread's stacks, without the `with` at which a counter would start from zero.

    Args:
        pushed: what `modes` gave on another thread.
    """
    stacks = torch.utils._python_dispatch
    with contextlib.ExitStack() as stack:
        for mode in pushed:
            if isinstance(mode, torch.overrides.TorchFunctionMode):
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(torch.overrides._pop_mode)
            else:
                stacks._push_mode(mode)
                # Most modes have no key of their own; those of PyTorch's infrastructure have.
                key = getattr(mode, "_dispatch_key", None) or getattr(mode, "_mode_key", None)
                stack.callback(stacks._pop_mode, key)
        yield


# Kernels that draw random numbers


dispatch_key: Callable[[str], str] = _private("torch._C._dispatch_key_for_device")
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
    few models, is left out.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    found: dict[str, GeneratorArgument | None] = {
        operator: GeneratorArgument(position, argument.kwarg_only)
        for operator in torch._C._dispatch_get_all_op_names()
        if operator.startswith("aten::") and has_kernel(operator, key)
        for position, argument in enumerate(torch._C._get_schema(*operator.partition(".")[::2]).arguments)
        if argument.name == "generator"
    }
    return found | ({_FUSED_DROPOUT: None} if has_kernel(_FUSED_DROPOUT, key) else {})


_FUSED_DROPOUT: Final = "aten::native_dropout"


def only_draws(operator: Any) -> bool:
    """Whether an operator below autograd returns random numbers, and not what it computes with them, as a dropout does.

    Example:
        >>> [only_draws(each) for each in (torch.ops.aten.randn.default, torch.ops.aten.native_dropout.default)]
        [True, False]
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags or len(operator._schema.returns) > 1:
        return False
    every = operator.overloadpacket
    names = {each.name for overload in every.overloads() for each in getattr(every, overload)._schema.arguments}
    return "generator" in names and "noise" not in names  # of attention, and of a leaky ReLU


random_on_cpu: Callable[[Tensor], Any] = functools.partial(
    _private("torch.library.get_kernel")("aten::random_", "CPU").call_boxed,
    _private("torch._C.DispatchKeySet")(_private("torch._C.DispatchKey.CPU")),
)
"""`Tensor.random_` on the CPU by PyTorch's own kernel, also while another one stands in its place."""


def may_trace_dtensor_draws() -> bool:
    """Whether DTensors are in use, and nothing is asked around their random operators."""
    tensor = getattr(dist, "tensor", None)  # there once it is imported completely
    if tensor is None:
        return False
    require(tensor, "_random._rng_tracker")
    return tensor._random._rng_tracker is None


class _DTensorDraws:
    distribute_region_enabled = True

    def __init__(self, region: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
        self._region = region

    def _distribute_region(self, spec: Any, generator: object = None) -> contextlib.AbstractContextManager[None]:
        return self._region(spec)


def trace_dtensor_draws(region: Callable[[Any], contextlib.AbstractContextManager[None]]) -> None:
    """Has PyTorch run each random operator of a DTensor in a context, which a function makes of the DTensor's spec."""
    random: Any = dist.tensor._random
    random._rng_tracker = _DTensorDraws(region)


# Norms of many gradients


def grouped(tensors: Sequence[Tensor]) -> list[tuple[torch.device, torch.dtype, list[int]]]:
    """The places of the tensors of each device and dtype, in the order in which `clip_grad_norm_` adds them."""
    if not tensors:
        return []
    groups = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return [(device, dtype, [int(place) for place in places]) for (device, dtype), (_, places) in groups.items()]


def norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """The norm of each, all of one device and dtype, by the operator that `clip_grad_norm_` takes."""
    if torch.utils._foreach_utils._has_foreach_support(tensors, tensors[0].device):
        return list(torch._foreach_norm(tensors, norm_type))
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]


multiply_each: Callable[[list[Tensor], Tensor], None] = _private("torch._foreach_mul_")
"""Multiplies tensors of one device by a 0-dimensional one, in place; few kernels for all."""

copy_each: Callable[[list[Tensor], list[Tensor]], None] = _private("torch._foreach_copy_")
"""Copies the values of the second tensors into the first ones; few kernels for all, of which there must be one."""


_clip_grad: Final[Any] = nn.utils.clip_grad


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
        if not self.checks and _clip_grad._clip_grads_with_norm_ is self:
            _clip_grad._clip_grads_with_norm_ = self.clip


def before_clip_grad_norm(check: Callable[[Iterable[Any]], None]) -> Callable[[], None]:
    """Calls a function with the parameters before `nn.utils.clip_grad_norm_` changes their gradients.

    There is no public way to see that call.

    Returns:
        A function that ends this.
    """
    require(_clip_grad, "_clip_grads_with_norm_")
    clip = _clip_grad._clip_grads_with_norm_
    if not isinstance(clip, _CheckedClip):
        clip = _CheckedClip(clip)
        _clip_grad._clip_grads_with_norm_ = clip
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
    return getattr(device_module, "_sleep", None)


# Process groups


def default_store() -> Store:
    """The store of the default process group."""
    require(dist.distributed_c10d, "_get_default_store")
    return dist.distributed_c10d._get_default_store()


def gloo_group(
    store: Store, rank: int, size: int, devices: list[Any], timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A gloo group that sends through network devices, and so a thread, which it shares with other groups."""
    kind: Any = dist.ProcessGroupGloo
    require(kind, "_Options._devices _Options._timeout")
    options = kind._Options()
    options._devices, options._timeout = devices, timeout
    return kind(store, rank, size, options)  # type: ignore[no-any-return]


def transfer_together(group: Any, operation: str, tensors: Iterable[Tensor], peer: int) -> Any:
    """Starts transfers of a group of NCCL, "send" or "recv", at once; the result has a `wait()`.

    It warns of a transfer that is started by itself. `dist.batch_isend_irecv` takes groups of all of the job only.
    """
    group._start_coalescing()
    try:
        for tensor in tensors:
            getattr(group, operation)([tensor], peer, 0)
    finally:
        work = group._end_coalescing()
    return work


def abort_process_groups() -> None:
    """`dist.destroy_process_group`, but what is under way ends, and no other rank is waited for."""
    require(dist.distributed_c10d, "_abort_process_group")
    dist.distributed_c10d._abort_process_group()


# Nested values


pytree = torch.utils._pytree
"""PyTorch's library of nested values, at which users and libraries register their classes."""
