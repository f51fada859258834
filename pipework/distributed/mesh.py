"""`init`, which joins a process with those that a launcher has started, and the `Mesh` of all of them."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipework import torch_private
from pipework.distributed.health import process_exit
from pipework.distributed.health.failure_detector import ProcessCalls
from pipework.distributed.store_prefix import attempt_prefix
from pipework.distributed.transport.groups import NO_TIMEOUT, break_group
from pipework.model.state_names import patterns_of, texts_of
from pipework.runtime.free_memory import processes_on_host
from pipework.schedule.argument_checks import positive_integers

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pipework.distributed.health.process_exit import ExitHook

logger = logging.getLogger("pipework")

PIPELINE = "pp"
REPLICAS = "dp"
LEFT_EARLY = "pipework_left_early"  # set on a DeviceMesh when another rank had not come to its end as this one did
_BROKEN = "pipework_broken"  # set on a DeviceMesh
PIPES = "pipework/pipes of {}"  # the key of the store at which a rank counts the pipes that it has made of a mesh


@dataclass(frozen=True, eq=False)
class Mesh:
    """The processes of a job: each is a worker of a pipe.

    There is a pipe for each place in the other dimensions: in those of the replicas, such as "dp", each is given other
    data; in any further one, such as "tp", it computes its part of the same layers on the same data.

    Attributes:
        device_mesh: PyTorch's own, with the dimension "pp" (the workers of one pipe), perhaps those of the replicas,
            and perhaps further ones, over which the layers themselves are sharded.
        device: of this process.
        store: through which the processes communicate beside their transfers.
        detect: seconds without a heartbeat after which a process is lost.
        action_timeout: seconds in one action after which a process is stuck; None: no limit.
        timeout: seconds to wait for other processes when a pipe is made.
        grace: seconds that a running action may still take when another process has failed; then this process is ended.
        local_parameters: see `init`.
        whole_stages: see `init`.
        replica_dimensions: those of the replicas; one that the mesh does not have counts as of size 1.

    Raises:
        ValueError: an argument is out of range.
        TypeError: `local_parameters` has another form.
    """

    device_mesh: DeviceMesh
    device: torch.device
    store: Store
    detect: float = 10.0
    action_timeout: float | None = None
    timeout: float = 300.0
    grace: float = 5.0
    local_parameters: Sequence[str] | Mapping[str, str | Sequence[str]] = ()
    whole_stages: int | None = None
    replica_dimensions: tuple[str, ...] = (REPLICAS,)

    def __post_init__(self) -> None:
        options = self.detect, self.action_timeout, self.timeout, self.grace
        _refuse_options(*options, self.local_parameters, self.whole_stages)

    @classmethod
    def of(
        cls,
        device_mesh: DeviceMesh,
        *,
        replicas: Sequence[str] = (REPLICAS,),
        **options: Any,
    ) -> Mesh:
        """A mesh from a `DeviceMesh` that the user has made.

        Args:
            device_mesh: with a dimension "pp".
            replicas: the dimensions along which each rank is given other data, such as ``("dp", "ep")`` for experts
                that are spread over "ep". The first one varies slowest in the number of a replica.
            **options: ``detect``, ``action_timeout``, ``timeout``, ``grace``, ``local_parameters`` and
                ``whole_stages``, as those of `init`.

        Raises:
            ValueError: it has no dimension "pp", or not those of the replicas, or this process is not in it, or an
                argument is out of range.
        """
        names = device_mesh.mesh_dim_names or ()
        if PIPELINE not in names:
            raise ValueError(
                f"the DeviceMesh has the dimensions {tuple(names)}: wanted 'pp' for a pipe's workers, 'dp' for its "
                "replicas if there are any, and any other names for dimensions over which the layers themselves are "
                'sharded, as in init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))'
            )
        # A set has another order in each process.
        along = texts_of(replicas) if isinstance(replicas, Sequence) else None
        wrong = along is None or not {*along} <= {*names} - {PIPELINE} or len({*along}) < len(along)
        if along is None or (wrong and along != (REPLICAS,)):
            raise ValueError(
                f"replicas={replicas!r}: wanted a dimension of the DeviceMesh or a tuple of them, each once and "
                f"without 'pp', along which the ranks are given other data; it has {tuple(names)}"
            )
        if device_mesh.get_coordinate() is None:
            raise ValueError(f"this process, rank {dist.get_rank()}, is not in the DeviceMesh")
        device = _current_device(device_mesh.device_type)
        return cls(device_mesh, device, torch_private.default_store(), replica_dimensions=along, **options)

    @property
    def rank(self) -> int:
        """The rank of this process among all."""
        return dist.get_rank()

    @property
    def ranks(self) -> list[int]:
        """The ranks of this process's replica, in the order of their workers."""
        return dist.get_process_group_ranks(self.device_mesh.get_group(PIPELINE))

    @property
    def worker(self) -> int:
        """The number of this process's worker."""
        return self.device_mesh.get_local_rank(PIPELINE)

    @property
    def replicas(self) -> list[int]:
        """The ranks with the same stages as this one, one of each replica: in the order of their replicas."""
        return self.same_layers_at(self.layer_dimensions)

    @property
    def data_parallel_size(self) -> int:
        """The number of replicas."""
        return len(self.replicas)

    @property
    def data_parallel_rank(self) -> int:
        """The number of this process's replica."""
        return self.replicas.index(self.rank)

    @property
    def some_replicas(self) -> list[list[int]]:
        """For each choice of some of the dimensions of replicas: the ranks that differ from this one in these alone."""
        along = [name for name in self.replica_dimensions if self._size(name) > 1]
        fewer = [kept for count in range(1, len(along)) for kept in itertools.combinations(along, count)]
        return [self.same_layers_at({*self._names} - {*kept}) for kept in fewer]

    @property
    def uses_nccl(self) -> bool:
        """Whether tensors go from one accelerator to another by NCCL, without the CPU."""
        return self.device.type == "cuda" and "cuda:nccl" in dist.get_backend_config()

    @property
    def everyone(self) -> list[int]:
        """All ranks, pipe by pipe: those of a replica are neighbours."""
        ranks = self.device_mesh.mesh.permute([self._names.index(name) for name in self._in_order()])
        return [int(rank) for rank in ranks.flatten()]

    @property
    def layout(self) -> dict[str, Any]:
        """The dimensions and the ranks, as JSON can express them; the same on all ranks."""
        along = [name for name in self.replica_dimensions if name in self._names]
        return {"dimensions": list(self._names), "of replicas": along, "ranks": self.device_mesh.mesh.tolist()}

    @property
    def layer_dimensions(self) -> list[str]:
        """The dimensions over which layers are sharded, such as "tp"."""
        return [name for name in self.dimensions_of_layers if name not in self.replica_dimensions]

    @property
    def dimensions_of_layers(self) -> list[str]:
        """The dimensions of the ranks that hold the same layers, or a part of them: all but the pipe's."""
        return [name for name in self._names if name != PIPELINE]

    @property
    def layer_ranks(self) -> list[int]:
        """The ranks that compute the layers of this one together with it, on the same data.

        Tensor, sequence and context parallelism are such. The layers call their collectives themselves. Each of these
        ranks is a worker of a pipe of its own, and all of these pipes must do the same: a rank that was given other
        rows would wait in a collective forever or mix up values. So the ranks compare their calls, see `step_calls`.
        """
        return self.same_layers_at(self.replica_dimensions)

    @property
    def same_layers(self) -> list[int]:
        """The ranks that hold the layers of this one, or a part of them, in all replicas."""
        return self.everyone[self.worker :: len(self.ranks)]

    def same_layers_at(self, dimensions: Collection[str]) -> list[int]:
        """The ranks of `same_layers` that have the same place as this rank in some dimensions.

        For example, in a mesh with "pp", "dp" and "tp", ``same_layers_at(["dp"])`` are the ranks of this rank's replica
        that hold the other shards of its layers.

        Args:
            dimensions: in which the place is the same.
        """
        own = self.device_mesh.get_coordinate()
        assert own is not None, "checked when the mesh was made"
        fixed = {PIPELINE, *dimensions}
        index = [place if name in fixed else slice(None) for name, place in zip(self._names, own, strict=True)]
        here = {*self.device_mesh.mesh[tuple(index)].flatten().tolist()}
        return [rank for rank in self.same_layers if rank in here]

    def place(self, position: int) -> dict[str, int]:
        """The place of a rank in all dimensions but "pp", for messages; dimensions of size 1 are left out.

        Args:
            position: of the rank in `everyone`.
        """
        names = [name for name in self._in_order() if name != PIPELINE]
        sizes = [self._size(name) for name in names]
        places = torch.unravel_index(torch.tensor(position // len(self.ranks)), sizes) if sizes else ()
        return {name: int(place) for name, size, place in zip(names, sizes, places, strict=True) if size > 1}

    @property
    def calls(self) -> ProcessCalls:
        """The calls of all pipes of this process: of all meshes that were made of one `DeviceMesh`."""
        calls: ProcessCalls = vars(self.device_mesh).setdefault("pipework_calls", ProcessCalls())
        return calls

    @property
    def hosts_store(self) -> bool:
        """Whether the store's server ends with this process: it runs in rank 0, unless it runs in a launcher."""
        return self.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def break_layer_groups(self) -> None:
        """Ends the collectives that wait in the groups of all dimensions but the pipe's; these cannot be used any more.

        A rank that dies in the middle of a collective breaks it for all others. Those of NCCL are left to the process's
        end.
        """
        for name in self.dimensions_of_layers:
            group: Any = self.device_mesh.get_group(name)
            if group.size() > 1 and "gloo" in str(group.name()):
                vars(self.device_mesh)[_BROKEN] = True
                break_group(group)

    def refuse_broken_groups(self) -> None:
        """Raises a RuntimeError if groups of the mesh were ended after a failure."""
        if _BROKEN in vars(self.device_mesh):
            raise RuntimeError(
                "a pipe over this mesh has failed while its layers waited in a collective, which had to be ended, and "
                "so the groups of the mesh cannot be used any more, nor those of a new mesh of the same dimensions, "
                "as DTensors keep the former ones: start the processes again from the last checkpoint"
            )

    @property
    def _names(self) -> tuple[str, ...]:
        return self.device_mesh.mesh_dim_names or ()

    def _in_order(self) -> list[str]:
        return [name for name in (*self.replica_dimensions, *self.layer_dimensions, PIPELINE) if name in self._names]

    def _size(self, name: str) -> int:
        return self.device_mesh.size(self._names.index(name)) if name in self._names else 1


def init(
    dp: int = 1,
    *,
    detect: float = 10.0,
    action_timeout: float | None = None,
    timeout: float = 300.0,
    grace: float = 5.0,
    local_parameters: Sequence[str] | Mapping[str, str | Sequence[str]] = (),
    whole_stages: int | None = None,
) -> Mesh | None:
    """Joins this process with the others that torchrun, or another launcher, has started.

    It chooses the device (one accelerator for each process of a machine, else the CPU with its share of the cores),
    makes PyTorch's process groups (NCCL for accelerators, gloo for the CPU and where processes share an accelerator),
    and separates a restarted job from the attempt before. From then on, an uncaught exception ends the process with an
    `exit_code` that shows which process failed: 70 this one, 71 another one, 72 another one that disappeared without a
    message.

    Args:
        dp: the number of replicas of the pipe, each of which is trained on a part of the data. The number of processes
            is a multiple of it, and neighbouring ranks are the workers of one pipe.
        detect: seconds without a heartbeat after which a process is lost; at least 1.
        action_timeout: seconds in one action of a step after which a process is stuck, and twice as many if it waits
            for another one that is in the same step; None: no limit.
        timeout: seconds to wait for all processes.
        grace: seconds that a running action may still take when another process has failed. Then this process is ended,
            since a layer that does not return cannot be interrupted.
        local_parameters: names of parameters, with ``*`` for any characters, that each process has values of its own
            of, such as ``["*.experts.*"]`` for experts that are spread over the replicas, or shards that a layer cuts
            by hand. If the mesh has several dimensions beside "pp", it says over which of them the values differ:
            ``{"*.experts.*": "ep"}``, or a list of names. Over these dimensions the parameters are neither compared nor
            averaged; their gradients are divided by the number of replicas, because the loss is the mean of theirs.
            DTensors need no name here.
        whole_stages: of layers that FSDP2 shards over "dp" (`fully_shard`), at most so many stages of a worker have
            whole parameters at a time: those that it needs next. Fewer take less memory and gather more often. None:
            all stages of the worker, from the beginning of a call to its end.

    Returns:
        The mesh for `Pipe(..., mesh=...)`. None in a process that no launcher has started (without RANK and WORLD_SIZE
        in its environment), where a pipe's workers are threads.

    Raises:
        ValueError: the number of processes is no multiple of `dp`, or an argument is out of range.
        TypeError: `local_parameters` has another form.
        TimeoutError: a process has not joined in time.

    Example:
        >>> import pipework
        >>> pipework.init() is None  # no launcher has started this process
        True
    """
    if isinstance(dp, bool) or not isinstance(dp, int) or dp < 1:
        raise ValueError(f"dp is the number of replicas, a positive integer: got {dp!r}")
    options = detect, action_timeout, timeout, grace, local_parameters, whole_stages
    _refuse_options(*options)
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        if dp > 1:
            logger.warning(
                "dp=%d has no effect: this is a single process, which trains a single replica. Start as many processes "
                "as replicas, or a multiple: torchrun --nproc-per-node %d %s",
                dp,
                dp,
                os.path.basename(sys.argv[0]) or "train.py",
            )
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if ranks % dp:
        raise ValueError(f"dp is {dp}, and there are {ranks} processes: wanted a number of replicas that divides them")
    neighbours = processes_on_host(ranks)
    device = _own_device(int(os.environ.get("LOCAL_RANK", rank)), neighbours)
    own_job = not dist.is_initialized()
    if own_job:
        store, _, _ = next(rendezvous("env://", timeout=timedelta(seconds=timeout)))
        prefix = attempt_prefix(store, rank, ranks, timeout)
        backend = _backend(device, neighbours)
        dist.init_process_group(
            backend, store=PrefixStore(prefix, store), rank=rank, world_size=ranks, timeout=NO_TIMEOUT
        )
    hook = process_exit.install()
    device_mesh = init_device_mesh(device.type, (dp, ranks // dp), mesh_dim_names=(REPLICAS, PIPELINE))
    if own_job:
        _destroy_at_exit(hook, device_mesh)
    return Mesh(device_mesh, device, torch_private.default_store(), *options)


def doubt_about_no_mesh() -> str | None:
    """What to warn of when a pipe is made without a mesh, on the first of several processes that `init` has joined.

    None where there is no such process, as with a process group that the program made itself
    (`DistributedDataParallel`), or where the mesh has been used for a pipe before.
    """
    joined = isinstance(sys.excepthook, process_exit.ExitHook) and dist.is_initialized()
    if not joined or dist.get_world_size() == 1 or dist.get_rank() > 0:
        return None
    with contextlib.suppress(RuntimeError):  # the store may be gone
        if torch_private.default_store().check([PIPES.format(dist.get_rank())]):
            return None
    return (
        f"pipework.init() has joined {dist.get_world_size()} processes, and this pipe has no mesh: each process trains "
        "the whole model, alone. Give Pipe mesh=mesh, which is what init() returned; or devices=, if the workers are "
        "to be threads of each process"
    )


def _refuse_options(
    detect: float, action_timeout: float | None, timeout: float, grace: float, local: Any, whole_stages: int | None
) -> None:
    """Raises a ValueError or a TypeError for an argument; see `init`."""
    if not detect >= 1:
        raise ValueError(f"detect must be at least 1 second, or a busy process would be lost: got {detect!r}")
    if action_timeout is not None and not action_timeout > 0:
        raise ValueError(f"action_timeout must be a positive number of seconds, or None: got {action_timeout!r}")
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds: got {timeout!r}")
    if not grace >= 0:
        raise ValueError(f"grace must be a number of seconds, 0 or more: got {grace!r}")
    if whole_stages is not None:
        positive_integers(whole_stages=whole_stages)
    patterns_of(local)


def mesh_of(given: Mesh | DeviceMesh) -> Mesh:
    """The mesh for what a user has given.

    Raises:
        TypeError: it is neither a `Mesh` nor a `DeviceMesh`.
    """
    if isinstance(given, DeviceMesh):
        return Mesh.of(given)
    if not isinstance(given, Mesh):
        raise TypeError(f"mesh is {given!r}: wanted what pipework.init() returns, or a DeviceMesh, or None")
    return given


def _destroy_at_exit(hook: ExitHook, device_mesh: DeviceMesh) -> None:
    """Has the process groups that `init` has made destroyed at a normal end, after those of the pipes."""
    world, process = weakref.ref(dist.group.WORLD), os.getpid()

    def destroy() -> None:
        if hook.was_called or os.getpid() != process or not dist.is_initialized() or dist.group.WORLD is not world():
            return
        if LEFT_EARLY in vars(device_mesh):
            torch_private.abort_process_groups()
        else:
            dist.destroy_process_group()

    weakref.finalize(hook, destroy)  # it follows those of pipes, which are made later; `atexit` would be before them


def _own_device(local_rank: int, neighbours: int) -> torch.device:
    """The device of this process; the processes of a machine divide the cores of its CPU."""
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
    """The backend: gloo for the CPU; an accelerator has its own, if there is one, unless several ranks share it."""
    if device.type == "cpu" or neighbours > torch.accelerator.device_count():
        return "gloo"
    try:
        return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    except ValueError:
        return "gloo"
