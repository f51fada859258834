"""`init`: what a script says once so that it runs under torchrun as well, and the `Mesh` that it gets."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from pipework import torch_private
from pipework.distributed.health import process_exit
from pipework.distributed.store_prefix import attempt_prefix
from pipework.testing.faults import faults_from_environment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipework.distributed.transport.channel import Group

logger = logging.getLogger("pipework")

PIPELINE = "pp"
REPLICAS = "dp"

# A rank may wait for another one as long as that is alive, which the monitor finds out sooner and says better.
FOR_EVER = timedelta(days=7)


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a job, each a worker of a pipe, and of which replica of it.

    Attributes:
        device_mesh: PyTorch's own, with the dimensions "dp" (replicas) and "pp" (the workers of one pipe).
        device: where this process computes.
        store: through which the processes find each other.
        detect: after how many seconds without a sign of life a process is taken for lost.
        action_timeout: after how many seconds in one action a process is taken for stuck; None: never.
        timeout: seconds to wait at most for other processes when a pipe is made.
        grace: seconds for an action that still runs when another process has failed; then this process is ended.

    Raises:
        ValueError: a time makes no sense.
    """

    device_mesh: DeviceMesh
    device: torch.device
    store: Store
    detect: float = 10.0
    action_timeout: float | None = None
    timeout: float = 300.0
    grace: float = 5.0

    def __post_init__(self) -> None:
        refuse_times(self.detect, self.action_timeout, self.timeout, self.grace)

    @classmethod
    def of(
        cls,
        device_mesh: DeviceMesh,
        *,
        detect: float = 10.0,
        action_timeout: float | None = None,
        timeout: float = 300.0,
        grace: float = 5.0,
    ) -> Mesh:
        """For a mesh that the user has made, with times as `init` has them.

        Raises:
            ValueError: it has no dimension "pp", or another one than that and "dp", or a time makes no sense.
        """
        names = device_mesh.mesh_dim_names or ()
        if PIPELINE not in names or set(names) - {PIPELINE, REPLICAS}:
            raise ValueError(
                f"the DeviceMesh has the dimensions {tuple(names)}: wanted 'pp' for a pipe's workers, and 'dp' for its "
                'replicas if there are any, as init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp")) has'
            )
        if device_mesh.get_coordinate() is None:
            raise ValueError(f"this process, rank {dist.get_rank()}, is not in the DeviceMesh")
        device = _current_device(device_mesh.device_type)
        return cls(device_mesh, device, torch_private.default_store(), detect, action_timeout, timeout, grace)

    @property
    def rank(self) -> int:
        """The number of this process among all."""
        return dist.get_rank()

    @property
    def ranks(self) -> list[int]:
        """The processes that hold the same replica as this one, by the number of their worker."""
        return dist.get_process_group_ranks(self.device_mesh.get_group(PIPELINE))

    @property
    def worker(self) -> int:
        """The worker that this process is."""
        return self.device_mesh.get_local_rank(PIPELINE)

    @property
    def data_parallel_size(self) -> int:
        """How many replicas there are."""
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh.size(names.index(REPLICAS)) if REPLICAS in names else 1

    @property
    def data_parallel_rank(self) -> int:
        """The replica that this process belongs to."""
        return self.device_mesh.get_local_rank(REPLICAS) if self.data_parallel_size > 1 else 0

    @property
    def replicas(self) -> list[int] | None:
        """The processes that hold the same stages as this one; None if it is the only one."""
        if self.data_parallel_size == 1:
            return None
        return dist.get_process_group_ranks(self.device_mesh.get_group(REPLICAS))

    @property
    def device_channel(self) -> bool:
        """Whether tensors go from accelerator to accelerator without the CPU."""
        return self.device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()

    @property
    def everyone(self) -> list[int]:
        """All processes, replica by replica."""
        return [int(rank) for rank in self._by_replica().flatten()]

    @property
    def hosts_store(self) -> bool:
        """Whether the store's server ends with this process: it is in that of rank 0, unless a launcher has it."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def _by_replica(self) -> torch.Tensor:
        names = self.device_mesh.mesh_dim_names or ()
        ranks = self.device_mesh.mesh
        return ranks if names[-1] == PIPELINE else ranks.T


def init(
    dp: int = 1,
    *,
    detect: float = 10.0,
    action_timeout: float | None = None,
    timeout: float = 300.0,
    grace: float = 5.0,
) -> Mesh | None:
    """Joins this process with the others that torchrun, or another launcher, has started.

    Chooses the device (one accelerator for each process of a machine, else the CPU with its share of the cores), makes
    PyTorch's process groups (NCCL for accelerators, gloo for the CPU and where processes share an accelerator), and
    keeps a restarted job apart from the attempt before. From then on, an exception that nobody handles ends the process
    with an exit code that tells who failed: 70 itself, 71 another process, 72 another process that is gone without a
    word.

    Args:
        dp: how many replicas of the pipe are trained, each on a part of the data. The number of processes is a multiple
            of it, and neighbouring ranks are the workers of one pipe.
        detect: after how many seconds without a sign of life a process is taken for lost; at least 1.
        action_timeout: after how many seconds in one action of a step a process is taken for stuck, and after twice as
            many if it waits for another one that is in the same step; None: never.
        timeout: seconds to wait at most for all processes to come.
        grace: when another process has failed, an action that still runs here gets so many seconds to end. Then this
            process is ended, since nobody can end a layer that does not return.

    Returns:
        What `Pipe(..., mesh=...)` takes; None in a process that no launcher has started (one without RANK and
        WORLD_SIZE in its environment), where a pipe's workers are threads.

    Raises:
        ValueError: the number of processes is no multiple of `dp`, or a time makes no sense.
        TimeoutError: some process has not come in time.

    Example:
        >>> import pipework
        >>> pipework.init() is None  # no launcher has started this process
        True
    """
    if isinstance(dp, bool) or not isinstance(dp, int) or dp < 1:
        raise ValueError(f"dp is the number of replicas, a positive integer: got {dp!r}")
    refuse_times(detect, action_timeout, timeout, grace)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if dp > 1:
            logger.warning("dp=%d has no effect: a single process trains a single replica; start it with torchrun", dp)
        if faults_from_environment():
            logger.warning("PIPEWORK_FAULT has no effect in a single process: start it with torchrun")
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % dp:
        raise ValueError(f"dp is {dp}, and there are {ranks} processes: wanted a number of replicas that divides them")
    neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    device = _own_device(int(os.environ.get("LOCAL_RANK", rank)), neighbours)
    if not dist.is_initialized():
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        prefix = attempt_prefix(store, rank, ranks, timeout)
        backend = _backend(device, neighbours)
        dist.init_process_group(
            backend, store=PrefixStore(prefix, store), rank=rank, world_size=ranks, timeout=FOR_EVER
        )
    process_exit.install()
    device_mesh = init_device_mesh(device.type, (dp, ranks // dp), mesh_dim_names=(REPLICAS, PIPELINE))
    return Mesh(device_mesh, device, torch_private.default_store(), detect, action_timeout, timeout, grace)


def refuse_times(detect: float, action_timeout: float | None, timeout: float, grace: float) -> None:
    """Raises a ValueError if one of the times, in seconds, makes no sense; see `init`."""
    if not detect >= 1:
        raise ValueError(f"detect must be at least 1 second, or a process that is merely busy is lost: got {detect!r}")
    if action_timeout is not None and not action_timeout > 0:
        raise ValueError(f"action_timeout must be a positive number of seconds, or None: got {action_timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds: got {timeout!r}")
    if not grace >= 0:
        raise ValueError(f"grace must be a number of seconds, 0 or more: got {grace!r}")


def mesh_of(given: Mesh | DeviceMesh) -> Mesh:
    """What a user has given as a mesh.

    Raises:
        TypeError: it is none.
    """
    if isinstance(given, DeviceMesh):
        return Mesh.of(given)
    if not isinstance(given, Mesh):
        raise TypeError(f"mesh is {given!r}: wanted what pipework.init() returns, or a DeviceMesh, or None")
    return given


def network_devices() -> list[Any]:
    """What gloo sends and receives with, each with a thread of its own: one for each interface that the user names.

    Groups that share them wake one thread for a message, wherever it comes from. With a few cores that is a fifth of
    the time of a short step.
    """
    named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not named:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in named]


def group_of(store: Store, name: str, members: Sequence[int], rank: int, devices: Sequence[Any] = ()) -> Group:
    """A group of some ranks, for what lies on the CPU; returns as soon as all of them have called this.

    PyTorch's own `new_group` wants either every rank of the job, or the same number of groups in each process.

    Args:
        store: through which they find each other.
        name: of the group, never used before with this store.
        members: its ranks.
        rank: of this process.
        devices: the network's, which groups may share; empty: some of its own.
    """
    own = list(devices) or network_devices()
    store = PrefixStore(name, store)
    return cast("Group", torch_private.gloo_group(store, members.index(rank), len(members), own, FOR_EVER))


def straight_group_of(store: Store, name: str, members: Sequence[int], rank: int) -> Group:
    """The same for what lies on CUDA devices, by NCCL."""
    kind: Any = dist.distributed_c10d.ProcessGroupNCCL  # which not every build of PyTorch has
    return cast("Group", kind(PrefixStore(name, store), members.index(rank), len(members)))


def _own_device(local_rank: int, neighbours: int) -> torch.device:
    """The device of this process; the CPU's cores are shared among the processes of a machine."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.accelerator.set_device_index(local_rank % torch.accelerator.device_count())
        return _current_device(accelerator.type)
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // neighbours))
    return torch.device("cpu")


def _current_device(kind: str) -> torch.device:
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def _backend(device: torch.device, neighbours: int) -> str:
    """The one for what lies on the CPU is gloo; an accelerator has its own, unless several ranks share it."""
    if device.type == "cpu" or neighbours > torch.accelerator.device_count():
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
