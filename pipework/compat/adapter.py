"""The common base of the three adapters: the interface of the old pipes around a `Pipe` that works as they did."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from pipework.executor import Executor
from pipework.model import mini_batch
from pipework.model.checkpoint import MODES
from pipework.model.marks import flattened
from pipework.pipe import Pipe
from pipework.torch_private import pytree
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pipework.runtime.program import Program
    from pipework.schedule import Schedule

Device = torch.device | int | str


class AdaptedExecutor(Executor):
    """Splits each tensor separately with `torch.chunk`, and runs backwards from the last micro-batch to the first.

    Nine rows in eight chunks become five micro-batches, and tensors may have different numbers of rows if they are
    split into equally many pieces.
    """

    def _checked(self, schedule: Schedule) -> Program:
        program = super()._checked(schedule)
        return replace(program, schedule=from_last_to_first(program.schedule))

    def _split(self, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> mini_batch.MiniBatch:
        tensors, structure, marks = flattened((inputs, keyword_inputs))
        pairs, chunks = zip(tensors, marks, strict=True), self.settings.chunks
        sizes = [None if mark else [len(piece) for piece in t.detach().chunk(chunks)] for t, mark in pairs]
        counts = list(dict.fromkeys(len(each) for each in sizes if each is not None))
        if not counts:
            raise TypeError(f"inputs do not have any tensors: {inputs}")
        if len(counts) > 1:
            raise RuntimeError(f"Found different number of chunks produced for inputs: {counts[0]} and {counts[1]}")
        return mini_batch.MiniBatch.of(tensors, tuple(sizes), structure)


def from_last_to_first(schedule: Schedule) -> Schedule:
    """Reverses the backwards of fill-drain, each with its recomputation before it.

    A parameter's gradient is then the sum over micro-batches .., 2, 1, 0, to whose last bits old results refer. The
    last micro-batch, which 'except_last' does not recompute, is the first to free its activations.

    Args:
        schedule: one in which each worker runs all its forwards first.

    Example:
        >>> from pipework.schedule import fill_drain, with_recompute
        >>> [str(action) for action in from_last_to_first(with_recompute(fill_drain(1, 3), 2)).orders[0]]
        ['0F0', '0F1', '0F2', '0B2', '0R1', '0B1', '0R0', '0B0']
    """
    orders = []
    for order in schedule.orders:
        forwards = [action for action in order if action.kind == "F"]
        others = [action for action in order if action.kind != "F"]
        orders.append((*forwards, *sorted(others, key=lambda action: -action.micro_batch)))
    return replace(schedule, orders=tuple(orders))


class AdaptedPipe(Pipe):
    """A pipe with such an executor."""

    _executor_type: ClassVar[type[Executor]] = AdaptedExecutor
    _warns: ClassVar[bool] = False  # old scripts run as they did

    def forward(self, *inputs: Any, **keyword_inputs: Any) -> Any:
        """As `Pipe.forward`, but outputs never share memory with tensors of the layers.

        The outputs of several micro-batches are concatenated. The old libraries also copied the output of a single
        micro-batch, so that scripts could overwrite it.
        """
        output = super().forward(*inputs, **keyword_inputs)
        if self.chunks > 1 and not any(isinstance(x, Tensor) and len(x) == 1 for x in pytree.tree_leaves(inputs)):
            return output
        return nested.replaced(output, Tensor, lambda tensor: torch.cat([tensor]) if tensor.dim() else tensor.clone())


def checked_chunks(chunks: Any) -> int:
    """The number of micro-batches; old pipes accept any value that `int()` accepts.

    Raises:
        ValueError: the value is less than 1, or not a number.
    """
    if int(chunks) <= 0:
        raise ValueError("number of chunks must be positive integer")
    return int(chunks)


def checked_mode(checkpoint: Any) -> str:
    """The checkpoint mode.

    Raises:
        ValueError: the mode is unknown.
    """
    if str(checkpoint) not in MODES:
        raise ValueError("checkpoint is not one of 'always', 'except_last', or 'never'")
    return str(checkpoint)


def setting(name: str, check: Callable[[Any], Any]) -> property:
    """A setting of the inner pipe as an attribute of an adapter.

    Args:
        name: of the setting.
        check: gives the value to be set for what the caller sets, or refuses it.
    """

    def change(adapter: Adapter, value: Any) -> None:
        executor = adapter._pipe._executor
        executor.settings = replace(executor.settings, **{name: check(value)})

    return property(lambda adapter: getattr(adapter._pipe, name), change)


class Adapter(nn.Module):
    """A module with the interface of an old pipe.

    Its parameters have the names of old checkpoints: `partitions.<partition>.<layer>...`. They are the parameters of
    the inner pipe, which is not a child of this module.

    Attributes:
        chunks: the largest number of micro-batches of a mini-batch; may be changed between mini-batches.
        checkpoint: the checkpoint mode, as in `Pipe`; may be changed between mini-batches.
        partitions: the layers in groups, which give the names. A layer in them may be replaced. The layers are called
            one by one, so hooks of a group itself are not called, and a warning says so.
        devices: of each partition.

    Args:
        pipe: runs the layers.
        partitions: see above.
        devices: see above.
    """

    partitions: Any  # an `nn.ModuleList` of `nn.Sequential`
    devices: list[torch.device]
    _pipe: AdaptedPipe

    def __init__(self, pipe: AdaptedPipe, partitions: Sequence[nn.Sequential], devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.__dict__["_pipe"] = pipe
        self.partitions = nn.ModuleList(partitions)
        self.devices = list(devices)
        for container in (self, self.partitions, *self.partitions):
            container.training = pipe.training

    chunks = setting("chunks", checked_chunks)
    checkpoint = setting("checkpoint", checked_mode)

    def __len__(self) -> int:
        """The number of layers."""
        return sum(map(len, self.partitions))

    def __iter__(self) -> Iterator[nn.Module]:
        """The layers in order."""
        for partition in self.partitions:
            yield from partition

    def __getitem__(self, index: int) -> nn.Module:
        """The layer at a position; negative ones count from the end."""
        return list(self)[index]

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Changes the dtype, as `nn.Module.to` does. Moving to a device is refused."""
        if "device" in kwargs or "tensor" in kwargs or (args and not isinstance(args[0], torch.dtype)):
            self.cuda()
        return super().to(*args, **kwargs)

    def cuda(self, device: Device | None = None) -> NoReturn:
        """Refused: the pipe manages where its layers are."""
        name = type(self).__name__
        raise TypeError(f"denied to move parameters and buffers, because {name} should manage device placement")

    def cpu(self) -> NoReturn:
        """Refused: the pipe manages where its layers are."""
        self.cuda()

    def _run(self, *inputs: Any) -> Any:
        """The output of the layers, including those that have replaced others in their partition."""
        if len(self) != len(self._pipe):
            raise ValueError(
                f"{type(self).__name__} was made with {len(self._pipe)} layers, and its partitions have {len(self)} "
                "now: a layer can be replaced, but make a new one to add or remove layers"
            )
        places = [(partition, place) for partition in self.partitions for place in partition._modules]
        for number, (name, (partition, place)) in enumerate(zip(list(self._pipe._modules), places, strict=True)):
            if partition._modules[place] is not self._pipe[number]:
                setattr(self._pipe, name, partition._modules[place])
                partition._modules[place] = self._pipe[number]  # moved, and perhaps converted
        return self._pipe(*inputs)


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


def refuse_shared_parameters(layers: Iterable[tuple[nn.Module, torch.device]]) -> None:
    """Refuses layers on different devices that share a parameter, since moving would split it into two.

    Raises:
        ValueError: layers on different devices share a parameter.
    """
    places: dict[int, torch.device] = {}
    for layer, device in layers:
        for parameter in layer.parameters():
            if places.setdefault(id(parameter), device) != device:
                raise ValueError("module with duplicate parameters on distinct devices is not supported")


def balancing(balance: Callable[..., list[int]], kind: type[nn.Sequential]) -> Callable[..., list[int]]:
    """`balance_by_time` or `balance_by_size` for a module whose layers a sequence of another class runs."""

    @functools.wraps(balance)
    def balanced(partitions: int, module: nn.Sequential, sample: Any, **options: Any) -> list[int]:
        return balance(partitions, kind(*module), sample if isinstance(sample, Tensor) else tuple(sample), **options)

    return balanced
