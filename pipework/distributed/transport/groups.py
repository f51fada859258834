"""Process groups of PyTorch: how they are made, what is used of them, and how they end."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo

from pipework import torch_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

NO_TIMEOUT: Final = timedelta(days=7)
"""A rank waits for another one as long as that is alive: the monitor decides this, and not a timeout of PyTorch."""

CALL, TEXT, ANY, COMPARISON = range(4)
"""What ranks exchange: records of calls; texts; whether something is so on any rank; what replicas train."""

MOST: Final = 63
"""Numbers of 64 bits that `begin_exchange` exchanges at most."""

_BREAKING_TAG: Final = 2**31 - 1

# gloo raises a RuntimeError. It names its source files, or what the system says of a socket.
_OF_GLOO: Final = (
    "gloo/transport", "gloo::", "Connection closed by peer", "Connection reset by peer",
    "Application timeout caused pair closure",  # of a group that was broken
)  # fmt: skip


class Group(Protocol):
    """The part of PyTorch's process groups that is used here."""

    def rank(self) -> int:
        """The number of this process in the group."""

    def size(self) -> int:
        """The number of processes in the group."""

    def send(self, tensors: list[Tensor], destination: int, tag: int) -> Any:
        """Starts to send; the result has a `wait()`."""

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Starts to receive into this memory."""

    def abort(self) -> None:
        """Ends all transfers, where the backend can."""


class LostConnectionError(Exception):
    """A transfer has failed, because the other rank is gone or because the group was broken.

    Args:
        rank: the other rank; None: it is not known.
    """

    def __init__(self, rank: int | None) -> None:
        super().__init__("a connection was lost" if rank is None else f"the connection to rank {rank} was lost")
        self.rank = rank


@contextlib.contextmanager
def transferring(rank: int | None = None) -> Iterator[None]:
    """Entered around transfers: if one fails, its error becomes a `LostConnectionError`.

    Args:
        rank: the other rank; None: it is not known.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise LostConnectionError(rank) from error


def is_broken_collective(error: BaseException) -> bool:
    """Whether an error says that other ranks did not take part in a collective to its end.

    Example:
        >>> is_broken_collective(RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
        True
        >>> is_broken_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    of_gloo = isinstance(error, RuntimeError) and any(part in str(error) for part in _OF_GLOO)
    return of_gloo or isinstance(error, dist.DistError)


def network_devices() -> list[Any]:
    """The devices by which gloo sends and receives, each with its own thread: one for each interface the user names.

    Groups that share them wake only one thread for a message from any rank. With few cores this saves a fifth of the
    time of a short step.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not named:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in named]


def group_of(store: Store, name: str, members: Sequence[int], rank: int, devices: Sequence[Any] = ()) -> Group:
    """A process group of some ranks, for tensors on the CPU; returns as soon as all of them have called this.

    PyTorch's own `new_group` must be called by every rank of the job, or as often in each process.

    Args:
        store: through which the members find each other.
        name: of the group, never used before with this store.
        members: its ranks.
        rank: of this process.
        devices: of the network, which gloo's groups may share; empty: the group makes its own.
    """
    place = PrefixStore(name, store), members.index(rank), len(members)
    return cast("Group", torch_private.gloo_group(*place, list(devices) or network_devices(), NO_TIMEOUT))


def nccl_group(store: Store, name: str, members: Sequence[int], rank: int, device: torch.device) -> Group:
    """A process group of some ranks, for tensors on CUDA devices; returns when all of them are connected.

    Args:
        store: through which the members find each other.
        name: of the group, never used before with this store.
        members: its ranks.
        rank: of this process.
        device: of this process; that of the calling thread from now on, or NCCL would take memory of the first one.
    """
    torch.accelerator.set_device_index(device)
    kind: Any = dist.distributed_c10d.ProcessGroupNCCL  # not every build of PyTorch has it
    group = kind(PrefixStore(name, store), members.index(rank), len(members), NO_TIMEOUT)
    group.eager_connect_single_device(device)  # else each of its first transfers would wait for the other rank
    return cast("Group", group)


def break_group(group: Group) -> None:
    """Ends all transfers of a group, also those that other threads wait for. The group cannot be used any more.

    A wait that times out closes all connections of a gloo group for good, which ends every other wait: this is the only
    way to end a wait of another thread. A connection that the other rank has closed fails at once, and closes no
    other: so it is tried with each.
    """
    for other in {*range(group.size())} - {group.rank()}:
        with contextlib.suppress(RuntimeError):
            group.recv([torch.empty(1)], other, _BREAKING_TAG).wait(timedelta(milliseconds=1))


def begin_gather(group: Any, values: Tensor | Sequence[int]) -> Callable[[], Tensor]:
    """Begins to exchange some values. Every rank of the group calls this, with as many of the same dtype.

    Returns:
        Waits, and returns a row of values for each rank. It raises a `LostConnectionError` if a rank is gone.
    """
    own = torch.as_tensor(values)
    rows = [torch.empty_like(own) for _ in range(group.size())]
    with transferring():
        work = group.allgather([rows], [own]) if len(own) else None

    def wait() -> Tensor:
        with transferring():
            if work is not None:
                work.wait()
        return torch.stack(rows)

    return wait


def begin_exchange(group: Any, kind: int, numbers: Sequence[int]) -> Callable[[], Tensor]:
    """Begins to exchange a few whole numbers. Every rank of the group calls this.

    What ranks exchange in a group begins with this, always with as many numbers: gloo ends a process that receives more
    than it expects. So ranks that make different calls see it here, and the monitor knows in which call each is.

    Args:
        group: of the ranks.
        kind: of what is exchanged, see `CALL` and the others.
        numbers: of this rank; at most `MOST`, and on all ranks as many.

    Returns:
        Waits, and returns a row of numbers for each rank. It raises a `LostConnectionError` if a rank is gone, or
        exchanges something of another kind.
    """
    wait = begin_gather(group, [kind, *numbers, *[0] * (MOST - len(numbers))])

    def finish() -> Tensor:
        rows = wait()
        if (rows[:, 0] != kind).any():
            raise LostConnectionError(None)
        return rows[:, 1 : 1 + len(numbers)]

    return finish


def any_of(group: Any, flag: bool) -> bool:
    """Whether the flag is set on any rank of a group. Every rank calls this, and waits here for all others.

    Raises:
        LostConnectionError: a rank is gone.
    """
    return bool(begin_exchange(group, ANY, [flag])().any())


def all_gather(group: Group, mine: bytes) -> list[bytes]:
    """The bytes of all ranks of a group, in order. Every rank calls this, and waits here for all others.

    Raises:
        LostConnectionError: a rank is gone.
    """
    sizes = begin_exchange(group, TEXT, [len(mine)])().flatten().tolist()
    rows = begin_gather(group, torch.frombuffer(bytearray(mine.ljust(max(sizes) + 1)), dtype=torch.uint8))()
    return [row[:size].numpy().tobytes() for row, size in zip(rows, sizes, strict=True)]
