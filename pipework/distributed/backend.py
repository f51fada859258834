"""The backend whose workers are processes of a torch.distributed job; each holds the layers of its own stages."""

from __future__ import annotations

import json
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pipework.backend import ProcessGroupView, StepCall
from pipework.distributed.agreement import contract, note_places
from pipework.distributed.gradients.data_parallel import Averaging
from pipework.distributed.gradients.found_inf import FoundInf
from pipework.distributed.gradients.grad_norm import (
    missing_gradients,
    norm_of_all,
    norms_of_stages,
    refuse_some_missing,
)
from pipework.distributed.gradients.tied import tied_parameters
from pipework.distributed.mesh import mesh_of
from pipework.distributed.peer_group import PeerGroup
from pipework.distributed.rendezvous import RendezvousSpec
from pipework.distributed.shared_tensors import SharedTensors, refuse_foreign_meshes, refuse_other_shards
from pipework.distributed.step_calls import Delivered, StepCalls
from pipework.distributed.transport.rank_transport import RankTransport
from pipework.fsdp_private import fsdp_modules
from pipework.model.release import refuse_optimizers_of_others, refuse_partial_clipping, release_layers
from pipework.model.state_names import local_dimensions, patterns_of
from pipework.runtime.random.streams import draw_key
from pipework.timeline.shared_clock import intervals_as_text, intervals_from_text
from pipework.values.dtensor import is_dtensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.assignment.assignment import Assignment
    from pipework.autograd.factor import Factor
    from pipework.backend import PipeSpec
    from pipework.distributed.mesh import Mesh
    from pipework.model.mini_batch import MiniBatch
    from pipework.runtime.program import Program
    from pipework.runtime.random.streams import Key
    from pipework.runtime.run_spec import RunSpec
    from pipework.runtime.skips.skip import Skip
    from pipework.runtime.transport import Transport
    from pipework.schedule import Action, Interval


class DistributedBackend(PeerGroup):
    """This process as one of those that hold a pipe; see `Backend`.

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
        super().__init__(mesh_of(mesh))
        self._own: Sequence[nn.Sequential] = ()  # the partitions of this process
        self._local_names: frozenset[str] = frozenset()
        self._must_compare = False  # whether the replicas are compared before the first action of this run

    @property
    def ranks(self) -> ProcessGroupView:
        """All processes of the pipe and its replicas."""
        mesh = self.mesh
        return ProcessGroupView(
            self.everyone.index(mesh.rank),
            self.everyone,
            mesh.data_parallel_rank,
            mesh.data_parallel_size,
            mesh.same_layers.index(mesh.rank),
            {name: mesh.device_mesh.get_local_rank(name) for name in mesh.dimensions_of_layers},
            self._local_names,
            self._share_text,
        )

    def _share_text(self, text: str) -> list[str]:
        """The texts of all processes; what follows may be the last of a training, so losses are compared, too."""
        with self.calling("checkpoint"):
            return self._gather_compared("everyone", text)

    @property
    def stopping(self) -> bool:
        """Whether a process was asked to end; after this question the program is trusted to leave by itself."""
        self._stop_was_seen = True
        return self.stops

    # ---- making a pipe ----------------------------------------------------------------------------------------------

    def own_stages(self, assignment: Assignment) -> list[int]:
        """The stages of this rank's worker. Raises a ValueError if any process would have none."""
        workers, processes = len(set(assignment.placement)), len(self.pipe_ranks)
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
        named, patterns = list(spec.tensors), patterns_of(mesh.local_parameters)
        refuse_foreign_meshes(named, mesh.everyone, mesh.same_layers)
        local_names = local_dimensions(spec.module, patterns)
        self._local_names = frozenset(local_names)
        pairs = [(stage, stage + 1) for stage in range(len(placement) - 1)]
        pairs += [pair for skip in spec.skips for pair in skip.hops]
        tied = tied_parameters(spec.partitions, placement)
        self.tied_stages, self.tied_ids = [each.stages for each in tied], {id(each.parameter) for each in tied}
        local = sorted(map(list, patterns.items()), key=str)
        agreed = contract(
            spec.module,
            spec.assignment,
            **spec.settings.told,
            training=spec.module.training,
            key_of_layers_on_the_meta_device=spec.key,
            local_parameters=local,
            whole_stages=mesh.whole_stages,
        )
        tensors = self._tensors = SharedTensors(named, mesh, local_names)
        self.meet(RendezvousSpec(placement, pairs, tied), agreed, tensors, spec.open_workers)
        groups, every_replicas = self.connections.groups, self.connections.every_replicas
        layers = (groups["layers"], mesh.layer_ranks) if "layers" in groups else None
        self._calls = StepCalls(
            groups["control"], self.pipe_ranks, placement[0], placement[-1], layers, tensors.digest_of_trained
        )
        self._found_inf = FoundInf(groups["everyone"], mesh.device)
        self._averaging = Averaging(
            every_replicas, tensors, self.monitor.progress.waits, gathers_in_order=mesh.whole_stages is not None
        )
        self._leave_to_others(spec)
        note_places(spec.partitions)

    def _leave_to_others(self, spec: PipeSpec) -> None:
        """Frees the layers of other ranks, and refuses what would silently work with this rank's layers alone."""
        placed = list(zip(spec.assignment.placement, spec.partitions, strict=True))
        own = self._own = [partition for worker, partition in placed if worker == self.mesh.worker]
        others = [(f"rank {self.pipe_ranks[worker]}", part) for worker, part in placed if worker != self.mesh.worker]
        before = release_layers([(n, layer, who) for who, part in others for n, layer in part.named_children()], own)
        if others:
            refuse_optimizers_of_others(self, before)
            mine = weakref.WeakSet(own)  # a layer may have a reference to the pipe, which would never end
            refuse_partial_clipping(self, lambda: [layer for partition in mine for layer in partition])

    def program(self, program: Program, skips: Sequence[Skip]) -> Program:
        """The program with sends, receives and reductions."""
        hops = [pair for skip in skips for pair in skip.hops]
        # What is sharded over a single replica is reduced, too.
        reduces = self.mesh.data_parallel_size > 1 or bool(fsdp_modules(self._own))
        return program.across(hops, reduces=reduces, whole_stages=self.mesh.whole_stages)

    # ---- a call -----------------------------------------------------------------------------------------------------

    def rank_of(self, worker: int) -> int | None:
        """The number of the worker's process in the job."""
        return self.pipe_ranks[worker]

    def begin(self, call: StepCall, batch: MiniBatch | None, inputs: Any, target: Any) -> StepCall:
        """Sends all ranks what the first and the last of them were given."""
        call = call if batch is None else call.reading(batch)
        call = call._replace(key=draw_key() if call.training else None)
        mine = self._calls.own(call, inputs, target)
        return self.on_worker(lambda: self._calls.exchange(mine, batch))

    def expect_backward(self) -> Callable[[Factor], None] | None:
        """See `Backend.expect_backward`."""
        return self._calls.losses.expect()

    def share_key(self, call: StepCall, key: Key) -> None:
        """See `Backend.share_key`."""
        if call.key is None and any(self.gather("control", "yes" if key.drawn else "")):
            key.value()

    def clip_grad_norm_(
        self, stages: Mapping[int, nn.Sequential], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> Tensor:
        """By the norm of the gradients on all ranks of the pipe."""
        with self.calling("clip_grad_norm_"):
            norm = self._gradient_norm(stages, norm_type)
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

    def _gradient_norm(self, stages: Mapping[int, nn.Sequential], norm_type: float) -> Tensor:
        """The norm of all gradients of the pipe, computed on every rank from the norms of all ranks.

        Args:
            stages: the layers of each stage of this rank; a parameter of several stages counts once.
            norm_type: the order of the norm.

        Raises:
            ValueError: other ranks of the pipe brought other losses backward, or some that have the same layers have
                no gradient where others have one.
        """
        elsewhere, local = self.connections.tied.counted_elsewhere, self._tensors.local
        if len(self.everyone) > len(self.pipe_ranks):
            # The ranks that have parts of a DTensor take its norm in collectives of PyTorch. A rank that fails before
            # would leave the others there. So all ranks of the job come to the same verdict first.
            missing = missing_gradients(stages, local, self.mesh.layer_ranks)
            texts = self.gather("everyone", json.dumps(missing))
            try:
                refuse_some_missing(dict(zip(self.everyone, map(json.loads, texts), strict=True)))
            except ValueError as error:
                self._common_error = error
                raise
        parameters = {stage: list(layers.parameters()) for stage, layers in stages.items()}
        mine = norms_of_stages(parameters, {*elsewhere, *local}, norm_type)
        own = {stage: [each for each in every if id(each) in local] for stage, every in parameters.items()}
        found = norms_of_stages(own, elsewhere, norm_type, lambda each: local[id(each)][0] == self.mesh.rank)
        norms = [json.loads(text) for text in self._gather_compared("control", json.dumps(mine))]
        if self._tensors.any_are_local:
            norms += map(json.loads, self.gather("everyone", json.dumps(found)))
        return norm_of_all(norms, norm_type)

    def _gather_compared(self, name: str, text: str) -> list[str]:
        """See `PeerGroup.gather`. Raises a ValueError if another rank of this pipe brought other losses backward.

        No further call of the pipe may come that would notice it.
        """
        mine = self._calls.losses.told(waits=True)
        pairs = [each.split("\n", 1) for each in self.gather(name, f"{json.dumps(mine)}\n{text}")]
        for rank, (theirs, _) in zip(self.everyone if name == "everyone" else self.pipe_ranks, pairs, strict=True):
            if rank in self.pipe_ranks:
                self._calls.check_delivered(mine, Delivered(*json.loads(theirs)), rank)
        return [rest for _, rest in pairs]

    # ---- a run of the workers ---------------------------------------------------------------------------------------

    def transport(self, spec: RunSpec) -> Transport:
        """Channels to the other ranks."""
        for run in spec.runs.values():
            if run.sharded is not None:
                refuse_other_shards(run.sharded.parameters, self.mesh)
        self._must_compare = self._averaging.compare(spec, self._calls.losses.marks)
        return RankTransport(spec, self)

    def before_action(self, action: Action) -> None:
        """Called before each action of this process's worker."""
        progress = self.monitor.progress
        progress.action = action
        progress.count += 1
        if self._must_compare:
            self._must_compare = False
            self._averaging.end_comparison()

    def all_intervals(self, intervals: Sequence[Interval]) -> list[Interval]:
        """See `Backend.all_intervals`."""
        texts = self.gather("control", intervals_as_text(intervals))
        return [interval for text in texts for interval in intervals_from_text(text)]

    def reduce(self, spec: RunSpec, stage: int) -> None:
        """REDUCE_GRAD: begins to average the gradients of a stage, which are complete, over the replicas."""
        self._averaging.begin(spec, stage)

    def complete(self, spec: RunSpec) -> None:
        """After the last action: completes the gradients."""
        self._averaging.finish(spec)
        if spec.differentiates:
            self.connections.tied.add_up(spec.runs)
        if spec.differentiates and spec.step.scaler is not None:
            every = [run.aliases for run in spec.runs.values()]
            leaves = [leaf for aliases in every for leaf in aliases.leaves]
            gradients = [gradient for aliases in every for gradient in aliases.gradients()]
            self._found_inf.share(spec.step.scaler, leaves, gradients)
