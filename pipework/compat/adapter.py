"""What the three old pipes have in common: the old names outside, a `Pipe` inside."""

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
    """A module that looks like an old pipe.

    Its parameters are called `partitions.<partition>.<layer>...`, as they are in old checkpoints. They are those of the
    engine's layers, which does not count as a child of this module.

    Attributes:
        partitions: the layers in groups, which tell the names. A layer in them may be replaced. Layers are called one
            by one: hooks of a group itself are not.
        devices: of each partition.

    Args:
        engine: does the work.
        partitions: see above.
        devices: see above.
    """

    partitions: nn.ModuleList
    devices: list[torch.device]
    _engine: AdaptedPipe

    def __init__(
        self, engine: AdaptedPipe, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]
    ) -> None:
        super().__init__()
        self.__dict__["_engine"] = engine
        self.partitions = nn.ModuleList(partitions)
        self.devices = list(devices)
        for container in (self, self.partitions, *self.partitions):
            container.training = engine.training

    @property
    def chunks(self) -> int:
        """How many micro-batches a mini-batch is split into, at most; may be changed between mini-batches."""
        return self._engine.chunks

    @chunks.setter
    def chunks(self, chunks: int) -> None:
        self._engine.use(checked_chunks(chunks), self.checkpoint)

    @property
    def checkpoint(self) -> str:
        """Which micro-batches are computed again, as `Pipe` says it; may be changed between mini-batches."""
        return self._engine.checkpoint

    @checkpoint.setter
    def checkpoint(self, checkpoint: str) -> None:
        self._engine.use(self.chunks, checked_mode(checkpoint))

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
        """What the layers make of the inputs, also those that have replaced others in their partition."""
        if len(self) != len(self._engine):
            raise ValueError(
                f"{type(self).__name__} was made with {len(self._engine)} layers, and its partitions have {len(self)} "
                "now: a layer can be replaced, but make a new one to add or remove layers"
            )
        known = list(self._engine._modules.items())
        places = [(partition, place) for partition in self._groups() for place in partition._modules]
        for number, ((name, layer), (partition, place)) in enumerate(zip(known, places, strict=True)):
            if partition._modules[place] is not layer:
                setattr(self._engine, name, partition._modules[place])
                partition._modules[place] = self._engine[number]  # moved, and perhaps converted
        return self._engine(*inputs)

    def _refuse_to_move(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"denied to move parameters and buffers, because {name} should manage device placement")


def checked_chunks(chunks: Any) -> int:
    """A number of micro-batches, as old pipes accept it: anything that `int()` takes.

    Raises:
        ValueError: it is less than 1, or no number.
    """
    count = int(chunks)
    if count <= 0:
        raise ValueError("number of chunks must be positive integer")
    return count


def checked_mode(checkpoint: Any) -> str:
    """A checkpoint mode.

    Raises:
        ValueError: it is none.
    """
    mode = str(checkpoint)
    if mode not in MODES:
        raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
    return mode


def refuse_unfit(module: Any) -> None:
    """What an old pipe can wrap.

    Raises:
        TypeError: the module is no `nn.Sequential`.
        ValueError: a layer occurs in it twice.
    """
    if not isinstance(module, nn.Sequential):
        raise TypeError("module must be nn.Sequential to be partitioned")
    if len(list(module.named_children())) != len(module):
        raise ValueError("module with duplicate children is not supported")


def refuse_shared_parameters(partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
    """A parameter that is on two devices would be two.

    Raises:
        ValueError: partitions on different devices share a parameter.
    """
    places: dict[int, torch.device] = {}
    for partition, device in zip(partitions, devices, strict=True):
        for parameter in partition.parameters():
            if places.setdefault(id(parameter), device) != device:
                raise ValueError("module with duplicate parameters on distinct devices is not supported")
