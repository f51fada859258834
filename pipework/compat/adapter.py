"""The common base of the three adapters: the interface of the old pipes around a `Pipe`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self

import torch
from torch import Tensor, nn

from pipework.model.checkpoint import MODES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pipework.compat.adapted_pipe import AdaptedPipe

    Device = torch.device | int | str


_PLACES = (torch.device, int, str, Tensor)


class Adapter(nn.Module):
    """A module with the interface of an old pipe.

    Its parameters have the names of old checkpoints: `partitions.<partition>.<layer>...`. They are the parameters of
    the inner pipe, which is not a child of this module.

    Attributes:
        partitions: the layers in groups, which give the names. A layer in them may be replaced. The layers are called
            one by one, so hooks of a group itself are not called, and a warning says so.
        devices: of each partition.

    Args:
        pipe: runs the layers.
        partitions: see above.
        devices: see above.
    """

    partitions: nn.ModuleList
    devices: list[torch.device]
    _pipe: AdaptedPipe

    def __init__(self, pipe: AdaptedPipe, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.__dict__["_pipe"] = pipe
        self.partitions = nn.ModuleList(partitions)
        self.devices = list(devices)
        for container in (self, self.partitions, *self.partitions):
            container.training = pipe.training

    @property
    def chunks(self) -> int:
        """The largest number of micro-batches of a mini-batch; may be changed between mini-batches."""
        return self._pipe.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._pipe.use(checked_chunks(chunks), self.checkpoint)

    @property
    def checkpoint(self) -> str:
        """The checkpoint mode, as in `Pipe`; may be changed between mini-batches."""
        return self._pipe.checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._pipe.use(self.chunks, checked_mode(checkpoint))

    def __len__(self) -> int:
        """The number of layers."""
        return sum(map(len, self._groups()))

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        for partition in self._groups():
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        """The layer at a position; negative ones count from the end."""
        return list(self)[index]

    def _groups(self) -> Iterator[nn.Sequential]:
        yield from self.partitions  # type: ignore[misc]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Changes the dtype, as `nn.Module.to` does. Moving to a device is refused."""
        if "device" in kwargs or "tensor" in kwargs or isinstance(next(iter(args), None), _PLACES):
            self._refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refused: the pipe manages where its layers are."""
        self._refuse_to_move()

    def cpu(self) -> NoReturn:
        """Refused: the pipe manages where its layers are."""
        self._refuse_to_move()

    def _run(self, *inputs: Any) -> Any:
        """The output of the layers, including those that have replaced others in their partition."""
        if len(self) != len(self._pipe):
            raise ValueError(
                f"{type(self).__name__} was made with {len(self._pipe)} layers, and its partitions have {len(self)} "
                "now: a layer can be replaced, but make a new one to add or remove layers"
            )
        known = list(self._pipe._modules.items())
        places = [(partition, place) for partition in self._groups() for place in partition._modules]
        for number, ((name, layer), (partition, place)) in enumerate(zip(known, places, strict=True)):
            if partition._modules[place] is not layer:
                setattr(self._pipe, name, partition._modules[place])
                partition._modules[place] = self._pipe[number]  # moved, and perhaps converted
        return self._pipe(*inputs)

    def _refuse_to_move(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"denied to move parameters and buffers, because {name} should manage device placement")


def checked_chunks(chunks: Any) -> int:
    """The number of micro-batches; old pipes accept any value that `int()` accepts.

    Raises:
        ValueError: the value is less than 1, or not a number.
    """
    count = int(chunks)
    if count <= 0:
        raise ValueError("number of chunks must be positive integer")
    return count


def checked_mode(checkpoint: Any) -> str:
    """The checkpoint mode.

    Raises:
        ValueError: the mode is unknown.
    """
    mode = str(checkpoint)
    if mode not in MODES:
        raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
    return mode


def refuse_unfit(module: Any) -> None:
    """Refuses modules that an old pipe cannot wrap.

    Raises:
        TypeError: the module is not an `nn.Sequential`.
        ValueError: a layer occurs in it twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")


def refuse_shared_parameters(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """Refuses partitions on different devices that share a parameter, since moving would split it into two.

    Raises:
        ValueError: partitions on different devices share a parameter.
    """
    places: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for parameter in partition.parameters():
            if places.setdefault(id(parameter), device) != device:
                raise ValueError("module with duplicate parameters on distinct devices is not supported")
