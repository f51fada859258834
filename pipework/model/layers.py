"""A pipe as a container: its layers have the names of the un-partitioned module and stay on their devices."""

from __future__ import annotations

import contextlib
import operator
from collections import OrderedDict
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self, TypeVar

import torch
from torch import nn

from pipework import fsdp_private, torch_private
from pipework.model.materialize import filling, materialize_partitions, move, waits
from pipework.model.sequential import PipeSequential, WithDevice
from pipework.model.state_names import has_own_names, state_name, state_tensors

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

T = TypeVar("T")


class Layers(nn.Module):
    """Layers in partitions, each of which has a device.

    Args:
        partitions: the layers of each stage; those of `here` are on their device already.
        devices: of each stage.
        here: the stages of this process.
        key: the key of the random values of layers on the meta device.
    """

    # Every other attribute is a layer, which may have any name, such as "chunks" or "devices".
    _own_attributes: ClassVar[frozenset[str]] = frozenset(
        ("_elsewhere", "_first_layers", "_key", "_partitions", "_stage_devices", "_waiting")
    )

    # The arguments of a pipe are read-only. Methods such as `forward` may be replaced.
    _refused_attributes: ClassVar[frozenset[str]] = frozenset(
        {"balance", "checkpoint", "chunks", "devices", "schedule"}
        | {"input_device", "output_device", "partitions", "stages"}
    )

    def __init__(
        self,
        partitions: Sequence[nn.Sequential],
        devices: Sequence[torch.device],
        here: Sequence[int],
        key: int | None = None,
    ) -> None:
        super().__init__()
        self._partitions = {stage: partitions[stage] for stage in here}
        # Not add_module: it refuses names that are attributes of this class.
        for partition in self._partitions.values():
            self._modules.update(partition._modules)
        self._stage_devices = tuple([devices[stage] for stage in here])
        self._first_layers = tuple([sum(map(len, partitions[:stage])) for stage in here])
        self._key = key
        others = [partition for stage, partition in enumerate(partitions) if stage not in here]
        # The names of the layers of other processes; of parts of a model those of their tensors, too.
        self._elsewhere = frozenset([name for each in others for name in (*each._modules, *state_tensors(each))])
        self._waiting = bool(self._on_meta())

    @property
    def partitions(self) -> list[nn.Sequential]:
        """The partitions of this process: the same layers in groups. Hooks of a group are not called."""
        return list(self._partitions.values())

    @property
    def stages(self) -> list[int]:
        """The stage numbers of `partitions`: all stages, unless workers are processes."""
        return list(self._partitions)

    @property
    def input_device(self) -> torch.device:
        """The device that the inputs are moved to."""
        return self._stage_devices[0] if self._stage_devices else torch.device("cpu")

    @property
    def output_device(self) -> torch.device:
        """The device of the outputs, to which the target is moved."""
        return self._stage_devices[-1] if self._stage_devices else torch.device("cpu")

    def __len__(self) -> int:
        """The number of layers."""
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> nn.Module:
        """The layer at a position; negative ones count from the end. For several, use `pipe.partitions` or a list."""
        if isinstance(index, slice):
            raise TypeError(
                "a slice of a pipe is no pipe: take one layer, pipe[0], or several, nn.Sequential(*list(pipe)[2:4])"
            )
        return list(self)[operator.index(index)]

    def __setitem__(self, index: int, layer: nn.Module) -> None:
        """Replaces the layer at a position, as `nn.Sequential` does."""
        self._replace([*self._modules][operator.index(index)], layer)

    def train(self, mode: bool = True) -> Self:
        """Sets the training flag of all layers, as `nn.Module.train` does."""
        super().train(mode)
        for partition in self._partitions.values():
            partition.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Changes the dtype, as `nn.Module.to` does. Moving to a device is refused."""
        target = args[0] if args else kwargs.get("device", kwargs.get("tensor"))
        if target is not None and not isinstance(target, torch.dtype):
            _refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> NoReturn:
        """Refused: the pipe manages where its layers are."""
        _refuse_to_move()

    cpu = xpu = cuda

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles each layer, as `nn.Module.compile` does: workers call the layers, not the pipe.

        Example:
            >>> from pipework import Pipe
            >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2)), devices=["cpu"])
            >>> pipe.compile(backend="eager")
        """
        for layer in self:
            layer.compile(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads parameters and buffers, as `nn.Module.load_state_dict` does; fills layers on the meta device.

        The state dict may be that of the whole model: entries of layers of other processes are left out.
        """
        own = self._own_names()
        known = {*own.values()}
        loaded = OrderedDict((name, state_dict[key]) for name, key in own.items() if key in state_dict)
        for key, value in state_dict.items():
            if key not in known and not self._elsewhere & {key, key.partition(".")[0]}:
                loaded[key] = value
        torch_private.copy_metadata(state_dict, loaded)
        with contextlib.nullcontext() if assign else self._filling():
            found = super().load_state_dict(loaded, strict and not own, assign)
            missing = list(dict.fromkeys(state_name(self._modules, name) for name in found.missing_keys))
            if own and strict and (missing or found.unexpected_keys):
                raise RuntimeError(
                    "the state dict is not that of the model of this pipe: "
                    f"it lacks {missing[:8]}, and {found.unexpected_keys[:8]} are none of the model's"
                )
        if assign:
            self._waiting = True
            self._materialize()
        return type(found)(missing, found.unexpected_keys)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Parameters and buffers by name; those of parts of a model have the names that they have in the model."""
        result = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        for name, key in self._own_names().items():
            if prefix + name in result:
                result[prefix + key] = result.pop(prefix + name)
        return result

    def named_parameters(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """As of any module; those of parts of a model have the names that they have in the model."""
        yield from self._as_in_state(super().named_parameters("", *args, **kwargs), prefix)

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """As of any module; those of parts of a model have the names that they have in the model."""
        yield from self._as_in_state(super().named_buffers("", *args, **kwargs), prefix)

    def _as_in_state(self, named: Iterable[tuple[str, T]], prefix: str) -> Iterator[tuple[str, T]]:
        """With names as in a state dict. Parts of a model may have the same tensor under the same name."""
        seen: set[tuple[str, int]] = set()
        for name, tensor in named:
            own = state_name(self._modules, name)
            if own == name or (own, id(tensor)) not in seen:
                seen.add((own, id(tensor)))
                yield f"{prefix}.{own}" if prefix else own, tensor

    def _own_names(self) -> dict[str, str]:
        """From the full names of entries of a state dict to the model's own; empty without parts of a model."""
        if not has_own_names(self._modules):
            return {}
        return {name: state_name(self._modules, name) for name in super().state_dict(keep_vars=True)}

    @contextlib.contextmanager
    def _filling(self) -> Iterator[None]:
        """Gives layers on the meta device memory to copy values into; after an error they go back there.

        Afterwards, tensors that were not written, such as a mask that is in no state dict, are initialised if possible.
        """
        waiting = self._on_meta()
        with filling(waiting):
            yield
        if waiting:
            self._waiting = True
            self._materialize()

    def _on_meta(self) -> list[tuple[nn.Module, torch.device]]:
        """The layers that have no data and so cannot run, with their devices."""
        pairs = zip(self.partitions, self._stage_devices, strict=True)
        return [(layer, device) for part, device in pairs for layer in part if waits(layer, device)]

    def _materialize(self) -> dict[str, str]:
        """Tries again to initialise layers on the meta device; returns those that cannot be, and what they lack."""
        if not self._waiting:
            return {}
        left = materialize_partitions(self.partitions, self._stage_devices, self._first_layers, self._key)
        for part, device in zip(reversed(self.partitions), reversed(self._stage_devices), strict=True):
            move(part, device)
        self._waiting = bool(left)
        return left

    def _refuse_to_run_without_data(self) -> None:
        """Raises a RuntimeError if a layer lies on the meta device although its partition runs elsewhere."""
        left = self._materialize()
        if left:
            listed = "\n".join(f"layer {name!r}:\n{indent(tensors, '    ')}" for name, tensors in left.items())
            raise RuntimeError(
                "layers that were built on the meta device have no data and could not be initialised.\n"
                f"{listed}\nGive each of these classes a reset_parameters() that fills all that it owns, as the "
                "classes of torch.nn have, or load a checkpoint, pipe.load_state_dict(...), which has no buffers that "
                "are not persistent"
            )

    def _refuse_changed_partitions(self) -> None:
        """Raises a RuntimeError if a partition was given another layer, which is none of the pipe's."""
        held = {name: layer for partition in self._partitions.values() for name, layer in partition._modules.items()}
        if held != self._modules or sum(map(len, self._partitions.values())) != len(self._modules):
            changed = [name for name in held | self._modules if held.get(name) is not self._modules.get(name)]
            raise RuntimeError(
                f"layers {changed} of pipe.partitions are not those of the pipe, which are trained and saved: replace "
                "a layer in the pipe, pipe[index] = layer, for example by nn.Identity(); none can be added"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the pipe, or replaces the layer of that name."""
        if name in self._own_attributes:
            object.__setattr__(self, name, value)
        elif "_partitions" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in self._modules:
            self._replace(name, value)
        elif name in self._refused_attributes:
            raise AttributeError(
                f"{name!r} of a pipe cannot be changed: make a new Pipe of the same layers. If other processes have "
                "some of them, make the model again, and load a checkpoint; if the pipe is attached to a model, take "
                "it off before, `del model.forward`"
            )
        elif isinstance(value, nn.Module):
            raise AttributeError(
                f"{name!r} is not among the layers of this pipe ({', '.join(self._modules)}), and none can be added; "
                "put the module into the nn.Sequential before it is wrapped"
            )
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        """Deletes an attribute; refuses to remove a layer."""
        if name in self.__dict__.get("_modules", {}):
            raise AttributeError(f"layer {name!r} cannot be removed from a pipe; replace it, as by nn.Identity()")
        super().__delattr__(name)

    def _replace(self, name: str, layer: Any) -> None:
        """Replaces a layer."""
        if not isinstance(layer, nn.Module):
            raise TypeError(f"layer {name!r} of a pipe can be replaced by a module only, got {type(layer).__name__}")
        layer = self._prepared(layer.module if isinstance(layer, WithDevice) else layer)
        super().__setattr__(name, layer)
        for partition, device in zip(self._partitions.values(), self._stage_devices, strict=True):
            if name in partition._modules:
                move(layer, device)
                partition._modules[name] = layer
                self._waiting = self._waiting or waits(layer, device)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Replaces the layer of that name; a pipe cannot get more layers.

        Raises:
            AttributeError: there is no layer of that name.
            TypeError: the argument is not a module.
        """
        self.__setattr__(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Refused: a pipe has the parameters of its layers only."""
        _refuse_own_tensor("parameter", name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Refused: a pipe has the buffers of its layers only."""
        _refuse_own_tensor("buffer", name)

    def _prepared(self, layer: nn.Module) -> nn.Module:
        """The module that takes the place of a replaced layer; a subclass may convert it."""
        return layer


def refuse_own_behaviour(module: nn.Sequential) -> None:
    """Raises a TypeError if the module does more than run its layers, which a pipe would leave out silently."""
    if fsdp_private.is_fully_sharded(module):
        raise TypeError(
            "fully_shard was called for the whole model, which gathers parameters before its forward, and a pipe calls "
            "its layers only: leave fully_shard(model) out, and shard each layer, fully_shard(layer, mesh=mesh['dp'])"
        )
    found = {
        "a forward of its own": type(module).forward not in (nn.Sequential.forward, PipeSequential.forward),
        "parameters of its own": any(parameter is not None for parameter in module._parameters.values()),
        "buffers of its own": any(buffer is not None for buffer in module._buffers.values()),
        "hooks": torch_private.all_hooks(module),
    }
    if own := [what for what, is_there in found.items() if is_there]:
        raise TypeError(
            f"{type(module).__name__} has {' and '.join(own)}, which a pipe of its layers would leave out; "
            "wrap it as one layer, nn.Sequential(module), or give a plain nn.Sequential of its layers"
        )


def uncalled_hooks(partitions: Iterable[nn.Module]) -> list[str]:
    """A text for each partition with hooks: layers are called one by one, so nothing calls the partition itself."""
    return [
        f"partitions[{number}] has hooks, which are not called, since its layers are called one by one: "
        f"register them on a layer, such as partitions[{number}][-1]"
        for number, partition in enumerate(partitions)
        if torch_private.all_hooks(partition)
    ]


def _refuse_own_tensor(what: str, name: str) -> NoReturn:
    raise AttributeError(
        f"{what} {name!r} cannot be registered in a pipe, which has those of its layers only: no worker would use it, "
        "and no checkpoint would have it. Put it into a layer before the nn.Sequential is wrapped, or keep it beside "
        "the pipe, in a module of its own"
    )


def _refuse_to_move() -> NoReturn:
    raise TypeError(
        "denied to move parameters and buffers, because Pipe should manage device placement; "
        "leave .cuda()/.to(device) out and pass devices= to Pipe; inputs are moved for you"
    )
