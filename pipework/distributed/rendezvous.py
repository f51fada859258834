"""Rendezvous: all ranks of a pipe make the groups and channels between them, at the same time."""

from __future__ import annotations

import contextvars
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.distributed_c10d import PrefixStore

from pipework.distributed.agreement import agree
from pipework.distributed.gradients.data_parallel import DataParallel
from pipework.distributed.gradients.tied import TiedParameters
from pipework.distributed.shared_tensors import refuse_any_different, refuse_some_different
from pipework.distributed.transport import groups
from pipework.distributed.transport.channel import Channel, DeviceChannel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.distributed.distributed_c10d import Store

    from pipework.distributed.gradients.tied import Tied
    from pipework.distributed.health.monitor import HealthMonitor
    from pipework.distributed.mesh import Mesh
    from pipework.distributed.shared_tensors import SharedTensors
    from pipework.distributed.transport.groups import Group

_POLL = 0.05  # seconds
_JOIN_TIMEOUT = 1.0  # seconds, for a thread whose transfers have been ended


@dataclass(frozen=True)
class RendezvousSpec:
    """A pipe as its ranks must know it to connect.

    Attributes:
        placement: the worker of each stage.
        pairs: stages that send each other values and gradients.
        tied: parameters that stages of several workers use.
    """

    placement: tuple[int, ...]
    pairs: Sequence[tuple[int, int]]
    tied: Sequence[Tied]


class Connections:
    """One rank's connections to the others. A pipe is complete only when all ranks have connected.

    Attributes:
        groups: for tensors on the CPU, by name: "control" is of all workers of this pipe, "everyone" of all ranks, and
            "layers", if there are several, of those that compute the same layers on the same data.
        channels: by worker, to each one with which this one exchanges messages.
        device_groups: for tensors on accelerators. Two ranks that share several have them in the same order.
        every_replicas: the groups of ranks that average gradients, in the order in which each rank uses them. The first
            has all ranks that hold the same stages. Each of the others has some of them, such as those with the same
            experts.
        tied: parameters of which other ranks have copies.
        agreed: whether all ranks have come, with equal contracts. Before, each rank finds by itself what differs.
    """

    tied: TiedParameters

    def __init__(
        self, mesh: Mesh, store: Store, spec: RendezvousSpec, tensors: SharedTensors, contract: Mapping[str, Any]
    ) -> None:
        self.agreed = False
        self._contract = contract
        self._mesh = mesh
        self._store = store
        self._spec = spec
        self._tensors = tensors
        self._devices = groups.network_devices()
        self._over = threading.Event()  # set when the caller no longer waits for the result
        self.groups: dict[str, Group] = {}
        self.channels: dict[int, Channel] = {}
        self.device_groups: list[Group] = []
        self.every_replicas: list[DataParallel] = []

    def abort(self) -> None:
        """Ends all transfers for good."""
        for channel in list(self.channels.values()):
            channel.abort()
        for group in list(self.groups.values()):
            groups.break_group(group)
        for replicas in self.every_replicas:
            replicas.abort()
        for group in self.device_groups:
            group.abort()

    def forget(self) -> None:
        """After a failed run: releases the tensors of unfinished transfers."""
        for channel in self.channels.values():
            channel.forget()

    # ---- the rendezvous ---------------------------------------------------------------------------------------------

    def make(self, monitor: HealthMonitor) -> None:
        """Connects, on a thread of its own: that thread is abandoned if another rank fails, because it may wait for it.

        Raises:
            PipelineError: another rank has failed.
            ValueError: the ranks disagree about the pipe.
            TimeoutError: a rank has not come.
        """
        errors: list[BaseException] = []
        done = threading.Event()

        def raise_failure() -> None:
            if monitor.failure is not None:
                raise monitor.error()

        def job() -> None:
            try:
                self._connect_all()
            except BaseException as error:
                errors.append(error)
            done.set()

        thread = threading.Thread(target=job, name="pipework rendezvous", daemon=True)
        contextvars.Context().run(thread.start)  # if it is abandoned, it keeps nothing of the caller's variables
        try:
            while not done.wait(_POLL):
                raise_failure()
            for error in errors:
                raise error
            # The store may end with the first rank that ends; afterwards nothing can be learnt about that rank.
            while not monitor.has_seen_all:
                raise_failure()
                time.sleep(_POLL / 5)
        except BaseException:
            self._over.set()
            self.abort()
            thread.join(_JOIN_TIMEOUT)
            raise

    def _connect_all(self) -> None:
        mesh = self._mesh
        in_order = sorted(mesh.everyone)  # which another rank may have in another order, until they have agreed
        self.groups["everyone"] = self._group(self._store, "everyone", in_order, mesh.rank)
        agree(self.groups["everyone"], in_order, self._contract)
        self.agreed = True
        mesh.refuse_broken_groups()
        own = PrefixStore(f"pipe {mesh.everyone.index(mesh.rank) // len(mesh.ranks)}", self._store)
        self._connect(own)
        self.groups["control"] = self._group(own, "control", range(len(mesh.ranks)), mesh.worker)
        if mesh.data_parallel_size > 1:
            for ranks in (mesh.replicas, *self._tensors.averaging[1:]):
                both = self._groups(self._store, f"replicas on {ranks}", ranks, mesh.rank)
                self.every_replicas.append(DataParallel(both[0], ranks, both[1], mesh.data_parallel_size))
            for replicas in self.every_replicas:
                refuse_some_different(*self._compared(replicas.group, replicas.ranks))
            for replicas in self.every_replicas:
                replicas.share_values(self._tensors.averaged(replicas.ranks), self._tensors.compared(replicas.ranks))
        if len(same_layers := mesh.layer_ranks) > 1:
            name = f"layers of worker {mesh.worker} of replica {mesh.data_parallel_rank}"
            group = self._group(self._store, name, same_layers, mesh.rank)
            self.groups["layers"] = group
            refuse_any_different(self._compared(group, same_layers)[0], same_layers, mesh.layer_dimensions)
        self.tied = TiedParameters(self._spec, mesh, self.channels)
        self.tied.share_values()

    def _compared(self, group: Group, ranks: Sequence[int]) -> tuple[list[str], list[str]]:
        """How the tensors that these ranks share compare."""
        return self._tensors.compare(ranks, groups.begin_gather(group, self._tensors.digests(ranks))())

    def _connect(self, store: Store) -> None:
        """Makes a channel to each worker that this one exchanges messages with.

        Every step waits for the other rank of a pair. All ranks take their pairs in ascending order, and both ranks of
        a pair take its steps in the same order, so the first step of all that is not done has both its ranks: no ranks
        wait for each other in a circle.
        """
        mesh, spec = self._mesh, self._spec
        place, here = spec.placement, mesh.worker
        pairs = [(place[a], place[b]) for a, b in spec.pairs]
        pairs += [(place[-1], worker) for worker in place]  # for the results
        pairs += [(place[a], place[b]) for tied in spec.tied for a in tied.stages for b in tied.stages]
        for low, high in sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]}):
            if here not in (low, high):
                continue
            ways = [self._groups(store, f"{a} to {b}", (low, high), here) for a, b in ((low, high), (high, low))]
            (outgoing, device_out), (incoming, device_in) = ways if here == low else ways[::-1]
            device_channel = None
            if device_out is not None and device_in is not None:
                device_channel = DeviceChannel(device_out, device_in, mesh.device)
            other = high if here == low else low
            self.channels[other] = Channel(
                mesh.ranks[other], outgoing, incoming, mesh.device, device_channel, mesh.device_mesh
            )
            if device_channel is not None:
                with groups.transferring():
                    device_channel.connect()

    def _groups(self, store: Store, name: str, members: Sequence[int], rank: int) -> tuple[Group, Group | None]:
        """A group for tensors on the CPU, and one of NCCL, connected, if there are tensors on accelerators."""
        group = self._group(store, name, members, rank)
        if not self._mesh.uses_nccl:
            return group, None
        name = f"{name}, NCCL"
        self._wait_for_members(store, name, members, rank)
        with groups.transferring():
            self.device_groups.append(groups.nccl_group(store, name, members, rank, self._mesh.device))
        return group, self.device_groups[-1]

    def _group(self, store: Store, name: str, members: Sequence[int], rank: int) -> Group:
        """A group for tensors on the CPU, made once all its members are there."""
        self._wait_for_members(store, name, members, rank)
        with groups.transferring():
            return groups.group_of(store, name, members, rank, self._devices)

    def _wait_for_members(self, store: Store, name: str, members: Sequence[int], rank: int) -> None:
        """Waits until all members of a group are there: PyTorch would wait for them, and nothing ends that wait."""
        key = f"{name}/member {{}}".format
        store.set(key(rank), "")
        pause, deadline = 0.001, time.monotonic() + self._mesh.timeout
        while not self._over.is_set() and not store.check([key(member) for member in members]):
            if not self.agreed and time.monotonic() > deadline:
                missing = [str(member) for member in members if not store.check([key(member)])]
                store.delete_key(key(rank))  # a rank that comes later would wait for this one, and block its store
                raise TimeoutError(
                    f"rank {', '.join(missing)} did not come within {self._mesh.timeout:.0f} s, and the others of the "
                    f"{len(members)} ranks of this pipe are there. Look at the logs of the missing ones"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL)
        if self._over.is_set():
            store.delete_key(key(rank))
            raise RuntimeError("the rendezvous was ended because a rank has failed")
