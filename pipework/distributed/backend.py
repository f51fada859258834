"""The backend whose workers are processes of a torch.distributed job; each holds the layers of its own stages."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework.backend import ProcessGroupView
from pipework.distributed.contract import contract, note_places
from pipework.distributed.gradients.clip_check import ClipCheck
from pipework.distributed.gradients.tied import tied_parameters
from pipework.distributed.mesh import mesh_of
from pipework.distributed.optimizer_check import OptimizerCheck
from pipework.distributed.parameter_check import check_parameters
from pipework.distributed.peer_group import PeerGroup
from pipework.distributed.rendezvous import RendezvousSpec
from pipework.distributed.shared_tensors import SharedTensors, refuse_foreign_meshes
from pipework.fsdp_private import fsdp_modules
from pipework.model.release import release_layers
from pipework.model.state_names import state_name
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.assignment.assignment import Assignment
    from pipework.autograd.factor import Factor
    from pipework.backend import PipeSpec, StepData, StepFacts, StepHeader
    from pipework.distributed.mesh import Mesh
    from pipework.model.mini_batch import MiniBatch
    from pipework.runtime.peers import Peers
    from pipework.runtime.program import Program
    from pipework.runtime.random.streams import Key
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.worker_threads import WorkerThreads


class DistributedBackend:
    """This process as one of those that hold a pipe; see `pipework.backend.Backend`.

    Args:
        mesh: the processes.
        devices: must be None, because each process of a mesh has its device.

    Raises:
        TypeError: `mesh` is no mesh.
        ValueError: it has other dimensions than a pipe's, or devices are given.
    """

    is_whole = False

    def __init__(self, mesh: Mesh | DeviceMesh, devices: Sequence[int | str | torch.device] | None = None) -> None:
        if devices is not None:
            raise ValueError(
                "devices is for workers that are threads: with a mesh, each process has its device already"
            )
        self.mesh = mesh_of(mesh)
        self.devices = [self.mesh.device] * len(self.mesh.ranks)
        self.data_parallel_rank = self.mesh.data_parallel_rank
        self.data_parallel_size = self.mesh.data_parallel_size
        self._group: PeerGroup | None = None
        self._checks: list[object] = []  # open as long as this object
        self._whole_stages: int | None = None
        self._own: Sequence[nn.Sequential] = ()  # the partitions of this process
        self._local_names: frozenset[str] = frozenset()

    @property
    def group(self) -> PeerGroup:
        """The processes, once they have come together."""
        assert self._group is not None, "join() comes first"
        return self._group

    @property
    def peers(self) -> Peers:
        """The processes, as a step sees them."""
        return self.group

    @property
    def ranks(self) -> ProcessGroupView:
        """All processes of the pipe and its replicas."""
        everyone, mesh = self.group.everyone, self.mesh
        position = everyone.index(mesh.rank)
        return ProcessGroupView(
            position,
            everyone,
            mesh.data_parallel_rank,
            mesh.data_parallel_size,
            mesh.same_layers.index(mesh.rank),
            {name: mesh.device_mesh.get_local_rank(name) for name in mesh.dimensions_of_layers},
            self._local_names,
            self._share_text,
        )

    def _share_text(self, text: str) -> list[str]:
        with self.group.calling("checkpoint"):
            self.group.faults.strike("save")
            return self.group.all_gather_text(text, compares_losses=True)

    @property
    def stopping(self) -> bool:
        """Whether a process was asked to end; after this question the program is trusted to leave by itself."""
        self.group.stop_was_seen = True
        return self.group.stopping

    def own_stages(self, assignment: Assignment) -> list[int]:
        """The stages of this rank's worker. Raises a ValueError if any process would have none."""
        workers, processes = len(set(assignment.placement)), len(self.mesh.ranks)
        if workers < processes:
            layers = sum(assignment.partitioning.balance)
            raise ValueError(
                f"the pipe has {layers} layer{'' if layers == 1 else 's'} for {workers} of {processes} processes: "
                f"start {workers or 'fewer'}, or make replicas of them (pipework.init(dp=...)), or give the pipe more "
                "layers or another balance; of a pipe made before, take the whole model, since it has the layers of "
                "its own process only"
            )
        return [stage for stage, worker in enumerate(assignment.placement) if worker == self.mesh.worker]

    def join(self, spec: PipeSpec) -> None:
        """Returns when all processes have come and agree about the pipe."""
        mesh, placement = self.mesh, spec.assignment.placement
        self.is_first, self.is_last = mesh.worker == placement[0], mesh.worker == placement[-1]
        named = list(spec.tensors)
        refuse_foreign_meshes(named, mesh.everyone, mesh.same_layers)
        check_parameters(spec.partitions, placement, mesh.ranks, mesh.worker, spec.grad_scaler)
        pairs = [(stage, stage + 1) for stage in range(len(placement) - 1)]
        pairs += [pair for skip in spec.skips for pair in skip.hops]
        self._whole_stages = spec.settings["whole_stages"]
        self._local_names = frozenset(spec.local_names)
        agreed = contract(spec.module, spec.assignment, **spec.settings)
        tied = tied_parameters(spec.partitions, placement)
        self._tied_stages = [each.stages for each in tied]
        tensors = SharedTensors(named, mesh, spec.local_names)
        self._group = PeerGroup(mesh, RendezvousSpec(placement, pairs, tied, agreed), tensors, spec.open_workers)
        self._leave_to_others(spec)
        note_places(spec.partitions)

    def _leave_to_others(self, spec: PipeSpec) -> None:
        """Frees the layers of other ranks, and refuses what would silently work with this rank's layers alone."""
        placed = list(zip(spec.assignment.placement, spec.partitions, strict=True))
        own = self._own = [partition for worker, partition in placed if worker == self.mesh.worker]
        own_ids = {id(parameter) for partition in own for parameter in partition.parameters()}
        others = [(self.mesh.ranks[worker], part) for worker, part in placed if worker != self.mesh.worker]

        before = [
            (state_name(partition._modules, name), f"rank {rank}", tensor)
            for rank, partition in others
            for name, tensor in partition.named_parameters()
            if id(tensor) not in own_ids and not tensor.is_meta
        ]
        release_layers([(n, layer, f"rank {rank}") for rank, part in others for n, layer in part.named_children()], own)
        if others:
            self._checks = [
                OptimizerCheck(before),
                ClipCheck(lambda: [layer for partition in own for layer in partition]),
            ]

    def use(self, workers: WorkerThreads) -> None:
        """See `Backend.use`."""
        self.group.use(workers)

    def program(self, program: Program, skips: Sequence[Skip]) -> Program:
        """The program with sends, receives and reductions."""
        hops = [pair for skip in skips for pair in skip.hops]
        # What is sharded over a single replica is reduced, too.
        reduces = self.group.reduces or bool(fsdp_modules(self._own))
        return program.across(hops, reduces=reduces, whole_stages=self._whole_stages)

    def check_copyable(self) -> None:
        """A copy would be a further process of the job."""
        raise TypeError(
            "a pipe whose workers are processes cannot be copied or pickled: copy its layers, or save it with "
            "pipework.save_checkpoint"
        )

    def rank_of(self, worker: int) -> int | None:
        """The number of the worker's process in the job."""
        return self.group.ranks[worker]

    @property
    def tied_stages(self) -> Sequence[tuple[int, ...]]:
        """See `Backend.tied_stages`."""
        return self._tied_stages

    @contextlib.contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """See `Backend.calling`."""
        if self.group.workers is not None:
            self.group.workers.refuse_own_thread()
        self.group.leave_if_unseen(what)
        with self.group.calling(what):
            yield

    def check_inputs(self, inputs: Collection[Any]) -> None:
        """Raises a TypeError if the first rank was given None."""
        if inputs and all(value is None for value in inputs):
            raise TypeError(
                f"inputs do not have any tensors: they are read on rank {self.mesh.rank}, where pipe.is_first, and "
                "were None there; only the others may pass None"
            )

    def begin(self, header: StepHeader, batch: MiniBatch | None, data: StepData) -> StepFacts:
        """Sends all ranks what the first and the last of them were given."""
        return self.group.begin(header, batch, data)

    def expect_backward(self) -> Callable[[Factor], None] | None:
        """See `Backend.expect_backward`."""
        return self.group.expect_backward()

    def common_error(self, error: ValueError) -> ValueError:
        """See `Backend.common_error`."""
        return self.group.common_error(error)

    def share_key(self, facts: StepFacts, key: Key) -> None:
        """See `Backend.share_key`."""
        if facts.key is None and self.group.any_of_replica(key.drawn):
            key.value()

    def request_stop(self) -> None:
        """See `Backend.request_stop`."""
        self.group.request_stop()

    def clip_grad_norm_(
        self, stages: Mapping[int, nn.Sequential], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """By the norm of the gradients on all ranks of the pipe."""
        parameters = {stage: list(partition.parameters()) for stage, partition in stages.items()}
        with self.group.calling("clip_grad_norm_"):
            norm = self.group.gradient_norm(parameters, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; "
                "leave error_if_nonfinite out to scale them by it anyway"
            )
        every = list(nn.ModuleList(stages.values()).parameters())
        nn.utils.clip_grads_with_norm_([each for each in every if not is_dtensor(each)], max_norm, norm)
        for parameter in filter(is_dtensor, every):  # PyTorch's operators on lists refuse DTensors of several meshes
            nn.utils.clip_grads_with_norm_([parameter], max_norm, norm)
        return norm
