"""How the ranks of one pipe come together: the groups and channels between them, made by all at the same time."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from pipework.distributed.gradients.data_parallel import DataParallel
from pipework.distributed.gradients.tied import TiedParameters
from pipework.distributed.mesh import group_of, network_devices
from pipework.distributed.transport.channel import Channel, LostConnectionError, break_group
from pipework.distributed.transport.device_channel import DeviceChannel

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.distributed_c10d import Store

    from pipework.distributed.gradients.tied import Tied
    from pipework.distributed.health.monitor import HealthMonitor
    from pipework.distributed.mesh import Mesh
    from pipework.distributed.transport.channel import Group

_LOOK = 0.05  # seconds
_PATIENCE = 1.0  # seconds, for a thread whose transfers have been ended


@dataclass(frozen=True)
class RendezvousSpec:
    """What the ranks hold together.

    Attributes:
        placement: the worker of each stage.
        pairs: of stages that send each other values and gradients.
        tied: the parameters that stages of several workers use.
        contract: what must be the same on all ranks, as JSON values.
    """

    placement: tuple[int, ...]
    pairs: Sequence[tuple[int, int]]
    tied: Sequence[Tied]
    contract: Mapping[str, Any]


@dataclass
class Connections:
    """One rank's ways to the others; what is made so far, while ranks still meet.

    Attributes:
        groups: of ranks of the CPU, by name: "control" is of all workers of this replica, "everyone" of all replicas.
        channels: to the workers that this one has to do with.
        replicas: the ranks that hold the same stages; None: there are no others.
        tied: the parameters that other ranks have, too.
    """

    groups: dict[str, Group] = field(default_factory=dict)
    channels: dict[int, Channel] = field(default_factory=dict)
    replicas: DataParallel | None = None
    tied: TiedParameters | None = None

    def abort(self) -> None:
        """Ends all transfers for good."""
        for channel in list(self.channels.values()):
            channel.abort()
        for group in list(self.groups.values()):
            break_group(group)
        if self.replicas is not None:
            self.replicas.abort()

    def forget(self) -> None:
        """After a failed run, lets go of the tensors that were on their way."""
        for channel in self.channels.values():
            channel.forget()


class Rendezvous:
    """All that waits for other ranks before there can be a step.

    Args:
        mesh: the processes.
        store: of this pipe alone.
        terms: what they hold together.
        tensors: this rank's parameters and buffers, which get the values of the first replica's.
        monitor: knows whether one of the others has failed meanwhile.
    """

    def __init__(
        self,
        mesh: Mesh,
        store: Store,
        terms: RendezvousSpec,
        tensors: Iterable[tuple[str, Tensor]],
        monitor: HealthMonitor,
    ) -> None:
        self._mesh = mesh
        self._store = store
        self._terms = terms
        self._tensors = tensors
        self._monitor = monitor
        self._devices = network_devices()
        self._made = Connections()
        self._over = threading.Event()  # nobody waits for the result any more

    def hold(self) -> Connections:
        """Meets the others: on another thread, which is left behind if one of them fails.

        Raises:
            PipelineError: another rank has failed.
        """
        errors: list[BaseException] = []
        done = threading.Event()

        def job() -> None:
            try:
                self._meet()
            except BaseException as error:
                errors.append(error)
            done.set()

        thread = threading.Thread(target=job, name="pipework rendezvous", daemon=True)
        thread.start()
        try:
            while not done.wait(_LOOK):
                self._raise_failure()
            for error in errors:
                raise error
            # The store may end with the first rank that does, and with it all that could still be learnt of that rank.
            while not self._monitor.has_seen_all:
                self._raise_failure()
                time.sleep(_LOOK / 5)
        except BaseException:
            self._over.set()
            self._made.abort()
            thread.join(_PATIENCE)
            raise
        return self._made

    def _raise_failure(self) -> None:
        if self._monitor.failure is not None:
            raise self._monitor.error()

    def _meet(self) -> None:
        mesh, made, placement = self._mesh, self._made, self._terms.placement
        position = mesh.everyone.index(mesh.rank)
        own = PrefixStore(f"replica {mesh.data_parallel_rank}", self._store)
        self._connect(own)
        made.groups["control"] = self._group(own, "control", range(len(mesh.ranks)), mesh.worker)
        made.groups["everyone"] = self._group(self._store, "everyone", range(len(mesh.everyone)), position)
        if (same := mesh.replicas) is not None:
            name = f"replicas of worker {mesh.worker}"
            group = self._group(self._store, name, same, mesh.rank)
            device_channel = None
            if mesh.device_channel:
                device_channel = self._group(
                    self._store, f"{name}, device_channel", same, mesh.rank, device_channel=True
                )
            made.replicas = DataParallel(group, same, device_channel)
            made.replicas.share_values(self._tensors)
        made.tied = TiedParameters(self._terms.tied, placement, mesh.worker, made.channels)
        made.tied.share_values()

    def _connect(self, store: Store) -> None:
        """A channel to each worker that this one has to do with; both make their groups in the same order."""
        mesh, terms = self._mesh, self._terms
        place, here = terms.placement, mesh.worker
        pairs = [(place[a], place[b]) for a, b in terms.pairs]
        pairs += [(place[-1], worker) for worker in place]  # to which the results go
        pairs += [(place[a], place[b]) for tied in terms.tied for a in tied.stages for b in tied.stages]
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            if here not in (low, high):
                continue
            both = (low, high)
            up = self._group(store, f"{low} to {high}", both, here)
            down = self._group(store, f"{high} to {low}", both, here)
            outgoing, incoming = (up, down) if here == low else (down, up)
            device_channel = None
            if mesh.device_channel:
                up = self._group(store, f"{low} device_channel to {high}", both, here, device_channel=True)
                down = self._group(store, f"{high} device_channel to {low}", both, here, device_channel=True)
                device_channel = DeviceChannel(*((up, down) if here == low else (down, up)), mesh.device)
            other = high if here == low else low
            self._made.channels[other] = Channel(mesh.ranks[other], outgoing, incoming, mesh.device, device_channel)

    def _group(
        self,
        store: Store,
        name: str,
        members: Sequence[int],
        rank: int,
        *,
        device_channel: bool = False,
    ) -> Group:
        """A group, made once all its members are there.

        To make one waits inside of PyTorch for who is not there, and nothing ends that wait. So it is done here.
        """
        store.set(f"{name}/member {rank}", "")
        keys = [f"{name}/member {member}" for member in members]
        pause = 0.001
        while not store.check(keys):
            if self._over.is_set():
                raise RuntimeError("the rendezvous is over, since a rank has failed")
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK)
        if self._over.is_set():
            raise RuntimeError("the rendezvous is over, since a rank has failed")
        try:
            return group_of(store, name, members, rank, self._devices, nccl=device_channel)
        except RuntimeError as error:  # one of them has ended in this very moment
            raise LostConnectionError(None) from error
