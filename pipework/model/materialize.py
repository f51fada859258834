"""Gives layers on the meta device memory and initialises them, each on the device where it will run.

Parameters and buffers stay the same objects, which optimizers and tied layers refer to: they get other contents.

A model that is larger than the host's memory is built under `with torch.device("meta")`, which makes tensors without
data. `reset_parameters()` fills a module. This is PyTorch's convention: the constructors of torch.nn call it, and so do
most that users write. It is called for children first, then for their parent, which is the order of constructors. A
parent may fill a child's parameter again, as `nn.MultiheadAttention` does with a bias.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.utils import swap_tensors

from pipework import torch_private
from pipework.model.sequential import named_layers
from pipework.runtime.random.streams import draw_key, mix
from pipework.signatures import signature_of
from pipework.values.dtensor import is_dtensor, local_part, local_region, with_local_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_OF_LIBRARY: Final = "initialiser_of"  # a method of a layer that knows how its model's library fills a module


@dataclass(frozen=True, eq=False)
class _Slot:
    """The place of a tensor in a module: among its parameters, its buffers, or its plain attributes.

    Attributes:
        module: that has the tensor.
        path: the name of the module in its layer.
        name: of the tensor in the module.
        tensor: the tensor that was there first.
        kind: "parameter", "buffer" or "attribute".
        registry: the dict of the module that contains the tensor.
    """

    module: nn.Module
    path: str
    name: str
    tensor: Tensor
    kind: str
    registry: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.path + '.' if self.path else ''}{self.name}: {self.kind} of {type(self.module).__name__}"


def on_meta(layer: nn.Module) -> bool:
    """Whether any tensor of a layer lies on the meta device and so has no data.

    Example:
        >>> on_meta(nn.Linear(2, 2)), on_meta(nn.Linear(2, 2, device="meta"))
        (False, True)
    """
    return any(slot.tensor.is_meta for slot in _slots(layer))


def waits(layer: nn.Module, device: torch.device) -> bool:
    """Whether a layer lacks the data with which it could run on a device."""
    return device.type != "meta" and on_meta(layer)


def materialize_partitions(
    partitions: Sequence[nn.Sequential],
    devices: Sequence[torch.device],
    first_layers: Sequence[int],
    key: int | None = None,
) -> dict[str, str]:
    """Gives layers on the meta device memory on the device of their partition, and initialises them.

    A layer's values depend on the key and its index alone, not on the device or on the other layers: they are drawn on
    the CPU. Tensors that have data keep it, also if they are tied to tensors without data. Parameters stay the same
    objects.

    Args:
        partitions: layers of a module.
        devices: one for each partition.
        first_layers: the index of each partition's first layer in the module.
        key: the key of the random values; None: drawn from the caller's generator if there are such layers.

    Returns:
        The layers that cannot be initialised and stay on the meta device: by the name of each, one line for each of its
        tensors that nothing initialises.

    Raises:
        RuntimeError: another object refers to a tensor in a way that an exchange would break.

    Example:
        >>> partition = nn.Sequential(nn.Linear(2, 2, device="meta"))
        >>> materialize_partitions([partition], [torch.device("cpu")], [0])
        {}
        >>> partition[0].weight.device
        device(type='cpu')
    """
    left = {}
    for part, device, first in zip(partitions, devices, first_layers, strict=True):
        for number, (name, layer) in enumerate(named_layers(part), first):
            if not waits(layer, device):
                continue
            key = draw_key() if key is None else key
            try:
                # The values of a part of a model depend on the names of its modules, not on where the model is cut.
                seed = key if hasattr(layer, _OF_LIBRARY) else mix(key, number, 0)
                with whole_parameters(layer, device):
                    unfilled = _initialise(layer, seed)
            except Exception as error:
                error.add_note(f"while layer {name!r}, which was built on the meta device, was initialised")
                raise
            if unfilled:
                left[name] = "\n".join(map(str, unfilled))
            else:
                move_module(layer, device)
    return left


def move(layer: nn.Module, device: torch.device) -> None:
    """Moves tensors with data to a device. Tensors without data stay on the meta device."""
    if not waits(layer, device):
        move_module(layer, device)
    else:
        torch_private.apply_to_tensors(layer, lambda t: t if t.is_meta else t.to(device))


@contextlib.contextmanager
def filling(layers: Sequence[tuple[nn.Module, torch.device]]) -> Iterator[None]:
    """Gives layers on the meta device memory to copy into. Afterwards, unwritten tensors go back to the meta device.

    Example:
        >>> layer = nn.Linear(2, 2, device="meta")
        >>> with torch.no_grad(), filling([(layer, torch.device("cpu"))]):
        ...     _ = layer.weight.fill_(1.0)
        >>> layer.weight.device.type, layer.bias.device.type
        ('cpu', 'meta')
    """
    memories: list[MetaMemory] = []
    failed = True
    try:
        for layer, device in layers:
            memories.append(MetaMemory(layer, device))
        yield
        failed = False
    finally:
        for meta_memory in memories:
            back = [tensor for tensor in meta_memory.tensors if failed or not meta_memory.is_written(tensor)]
            if back:
                meta_memory.take_back(*back)


def _initialise(layer: nn.Module, seed: int) -> list[_Slot]:
    """Fills a layer in the host's memory; if there are tensors that nothing fills, it goes back to the meta device.

    Args:
        layer: the layer.
        seed: of its random values.

    Returns:
        The places of the tensors that nothing fills.
    """
    slots = _slots(layer)
    missing = [slot for slot in slots if slot.tensor.is_meta]
    bare = {id(slot.tensor) for slot in missing}
    meta_memory = MetaMemory(layer, torch.device("cpu"))
    left = missing
    try:
        with _as_in_a_constructor(seed):
            _reset(layer, slots, bare, meta_memory, seed)
        left = [slot for slot in missing if not _is_filled(slot, meta_memory)]
    finally:
        if left:
            meta_memory.take_back()
    return left


def _reset(layer: nn.Module, slots: list[_Slot], bare: set[int], meta_memory: MetaMemory, seed: int) -> None:
    """Calls what fills the modules of a layer that have tensors without values, children first.

    Args:
        layer: the layer.
        slots: all tensors of the layer.
        bare: the ids of the tensors without values.
        meta_memory: of the layer.
        seed: of its random values.
    """
    done: set[int] = set()
    for module in _children_first(layer, set()):
        inside = set(module.modules())
        below = [slot for slot in slots if slot.module in inside and slot.kind != "attribute"]
        own = {id(slot.tensor) for slot in below if slot.module is module}
        needed = own & bare or any(s.module is module and s.tensor.is_meta for s in slots)
        reset = _reset_of(module, layer, seed)
        # A parent without tensors of its own may fill those of its children, unless they had values before.
        all_bare = bool(below) and all(id(slot.tensor) in bare for slot in below)
        if reset is None or not (needed or all_bare):
            continue
        tied = {id(slot.tensor) for slot in below if slot.module is module and id(slot.tensor) in done}
        kept = [slot for slot in below if id(slot.tensor) not in bare or id(slot.tensor) in tied]
        before = [(slot.tensor, slot.tensor.clone()) for slot in kept if not slot.tensor.is_meta]
        reset()
        for slot in below:
            _put_back(slot)
        for tensor, values in before:
            tensor.copy_(values)
        given = {id(tensor) for tensor in meta_memory.tensors}
        done |= {id(s.tensor) for s in below if id(s.tensor) in own & given and meta_memory.is_filled(s.tensor)}


def _put_back(slot: _Slot) -> None:
    """If a reset has replaced a tensor, copies the new values into the old one, to which others refer."""
    new = slot.registry.get(slot.name)
    if slot.kind == "attribute" or new is None or new is slot.tensor:
        return
    if slot.kind == "buffer" and (new.shape != slot.tensor.shape or new.dtype != slot.tensor.dtype):
        return
    slot.tensor.copy_(new)
    slot.registry[slot.name] = slot.tensor


def _is_filled(slot: _Slot, meta_memory: MetaMemory) -> bool:
    now = slot.registry.get(slot.name)
    if now is slot.tensor and slot.kind != "attribute":
        return meta_memory.is_filled(slot.tensor)
    return not (isinstance(now, Tensor) and now.is_meta)


def _slots(layer: nn.Module) -> list[_Slot]:
    found = []
    for path, module in layer.named_modules():
        kinds = {"parameter": module._parameters, "buffer": module._buffers, "attribute": module.__dict__}
        for kind, registry in kinds.items():
            found += [_Slot(module, path, n, t, kind, registry) for n, t in registry.items() if isinstance(t, Tensor)]
    return found


def _reset_of(module: nn.Module, layer: nn.Module, seed: int) -> Callable[[], object] | None:
    """What fills a module of a layer: its method, if it can be called without arguments, and what its library does."""
    own: Callable[[], object] | None = None
    for found in filter(callable, [getattr(module, name, None) for name in torch_private.RESETS]):
        with contextlib.suppress(TypeError, ValueError):
            signature_of(found).bind()
            own = found
            break
    of_library = getattr(layer, _OF_LIBRARY, None)
    return own if of_library is None else of_library(module, own, seed)


def _children_first(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _children_first(child, seen)
    yield module


@contextlib.contextmanager
def _as_in_a_constructor(seed: int) -> Iterator[None]:
    """Draws on the CPU from a seed, with no default device; restores the caller's generator afterwards."""
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def move_module(module: nn.Module, device: torch.device) -> None:
    """Moves a module to a device; its parameters stay the same objects.

    PyTorch moves the contents of a parameter between most devices. Between others, such as the CPU and a device type
    that was added to PyTorch, `Module.to` makes new parameters: an optimizer that was made before would go on with the
    old ones, and a parameter of two modules would become two. So the new contents are put into the old objects.

    Raises:
        RuntimeError: PyTorch made new parameters, and a graph or a weak reference holds on to an old one.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> weight = layer.weight
        >>> move_module(layer, torch.device("cpu"))
        >>> layer.weight is weight
        True
    """
    before = [(owner, dict(owner._parameters)) for owner in module.modules()]
    module.to(device)
    made = [
        (owner, name, parameter, owner._parameters[name])
        for owner, parameters in before
        for name, parameter in parameters.items()
        if parameter is not None and owner._parameters[name] is not parameter
    ]
    if not made:
        return
    exchanged = set()
    with torch_private.without_flat_weights(module):
        for owner, name, parameter, new in made:
            if id(parameter) not in exchanged:  # one that two modules share was moved twice
                swap_tensors(parameter, new)  # type: ignore[no-untyped-call]
                exchanged.add(id(parameter))
            owner._parameters[name] = parameter


class MetaMemory:
    """Gives a module's parameters and buffers on the meta device memory.

    The tensors stay the same objects, so an optimizer that has them keeps working, and tied tensors stay tied. The
    memory is filled with marks, which show later whether a tensor has been filled.

    Raises:
        RuntimeError: another object refers to a tensor in a way that an exchange would break. Nothing has changed then.

    Example:
        >>> layer = nn.Linear(2, 2, bias=False, device="meta")
        >>> weight = layer.weight
        >>> meta_memory = MetaMemory(layer, torch.device("cpu"))
        >>> layer.weight is weight, weight.device, meta_memory.is_filled(weight)
        (True, device(type='cpu'), False)
        >>> meta_memory.take_back(weight)
        >>> weight.device
        device(type='meta')
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module
        self._meta: dict[int, tuple[Tensor, Tensor, int]] = {}  # the tensor, its replacement, its version when marked
        with torch.inference_mode(False), torch_private.without_flat_weights(module):
            try:
                for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                    if tensor.is_meta:
                        self._give(name, tensor, device)
            except BaseException:
                self.take_back()
                raise

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that have got memory and still have it."""
        return [tensor for tensor, _, _ in self._meta.values()]

    def is_written(self, tensor: Tensor) -> bool:
        """Whether the tensor has been written to, other than through `.data`."""
        part = local_part(tensor)
        return torch_private.version(part) != self._meta[id(tensor)][2] or not part.numel()

    def is_filled(self, tensor: Tensor) -> bool:
        """Whether the whole tensor has been filled: no floating-point number is NaN.

        For integers the check finds only whether anything was written.
        """
        if tensor.is_floating_point() or tensor.is_complex():
            with contextlib.suppress(NotImplementedError, RuntimeError):  # some narrow types have no isnan
                return not bool(torch.isnan(local_part(tensor.detach())).any())
            return self.is_written(tensor)
        return self.is_written(tensor) or not bool(torch.all(local_part(tensor) == _mark(tensor.dtype)))

    def take_back(self, *tensors: Tensor) -> None:
        """Moves tensors back to the meta device; without arguments, all tensors that have got memory."""
        with torch_private.without_flat_weights(self._module):
            for tensor in tensors or self.tensors:
                swap_tensors(tensor, self._meta.pop(id(tensor))[1])  # type: ignore[no-untyped-call]

    def _give(self, name: str, tensor: Tensor, device: torch.device) -> None:
        if torch_private.has_tensor_hooks(tensor):
            raise RuntimeError(
                f"{name!r} lies on the meta device and cannot be given memory without losing its hooks: register them "
                "after the pipe is made"
            )
        part = torch.empty_like(local_part(tensor), device=device, requires_grad=False)
        with contextlib.suppress(NotImplementedError, RuntimeError):  # some narrow types cannot even be filled
            part.fill_(_mark(tensor.dtype))
        other = with_local_part(part, tensor)
        if isinstance(tensor, nn.Parameter):
            other = nn.Parameter(other, tensor.requires_grad)
        other.__class__ = type(tensor)
        other.__dict__.update(tensor.__dict__)  # attributes that users have set on a parameter
        try:
            swap_tensors(tensor, other)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(
                f"{name!r} lies on the meta device and cannot be given memory, because another object holds on to it "
                f"({error}): make that object, such as a graph, a compiled module or a wrapper, after the pipe"
            ) from error
        self._meta[id(tensor)] = (tensor, other, torch_private.version(local_part(tensor)))


def _mark(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).min


@contextlib.contextmanager
def whole_parameters(layer: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, a layer has whole parameters on the meta device in place of its DTensors there.

    Afterwards it has the DTensors again, the same objects. If a whole parameter has got memory inside, its DTensor has
    its part of that memory, on the device of the process.

    Args:
        layer: the layer.
        device: of the process.
    """
    wholes: dict[int, tuple[Tensor, nn.Parameter]] = {}
    places: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in layer.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_meta and is_dtensor(tensor):
                empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
                wholes.setdefault(id(tensor), (tensor, nn.Parameter(empty, tensor.requires_grad)))
                places.append((module._parameters, name, tensor))
    for registry, name, sharded in places:
        registry[name] = wholes[id(sharded)][1]
    try:
        yield
    finally:
        for registry, name, sharded in places:
            registry[name] = sharded
    for sharded, whole in wholes.values():
        if not whole.is_meta and is_dtensor(sharded):
            offsets, sizes = local_region("it", sharded)
            part = whole.detach()[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
            filled = with_local_part(part.to(device, copy=True, memory_format=torch.contiguous_format), sharded)
            swap_tensors(sharded, nn.Parameter(filled, sharded.requires_grad))  # type: ignore[no-untyped-call]
