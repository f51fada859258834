"""Reads the files of a checkpoint that this rank needs. Each is compared with its checksum before it is opened."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipework.saving import steps
from pipework.saving.files import DamagedError, UnfitError, verify_file
from pipework.saving.manifest import MANIFEST, optimizer_values, read_json, read_manifest
from pipework.saving.optimizer import SavedOptimizerShard, restore
from pipework.saving.shards import open_stage, own_part, shards_of
from pipework.saving.stages import check_fits
from pipework.saving.tensor_files import Kind
from pipework.saving.training import notes_on_ranks, read_training

if TYPE_CHECKING:
    from collections.abc import Mapping, Set
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from pipework.saving.collective import MeshCoordinate
    from pipework.saving.manifest import Manifest, SavedStage
    from pipework.saving.optimizer import Restored
    from pipework.saving.stages import Stages


@dataclass(frozen=True)
class Target:
    """The objects to load into: the stages of this rank, the optimizer, and the scheduler and scaler by name."""

    stages: Stages
    optimizer: Optimizer | None
    others: dict[str, Any]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: tensor for tensors in self.stages.values() for name, tensor in tensors.items()}

    @property
    def kinds(self) -> dict[str, Kind]:
        """Dtype and shape by name."""
        return {name: Kind.of(tensor) for name, tensor in self.tensors.items()}


@dataclass(frozen=True)
class LoadedState:
    """The contents of a checkpoint that were read into memory and fit.

    Attributes:
        step: the number of steps that were done.
        tensors: parameters and buffers.
        optimizer: the optimizer's state, if there is an optimizer to load into.
        training: the state that belongs to no stage; without random states if this rank is to keep its own.
        notes: messages to log, each with its level.
    """

    step: int
    tensors: dict[str, Tensor]
    optimizer: Restored | None
    training: dict[str, Any]
    notes: list[tuple[int, str]]


@dataclass(frozen=True)
class GatheredInfo:
    """Facts about all ranks, which each of them has gathered.

    Attributes:
        coordinate: the position of this rank.
        names: the names of the tensors of all ranks.
        same_random: whether the random generators of all replicas are in the same state.
    """

    coordinate: MeshCoordinate
    names: Set[str]
    same_random: bool


def read_checkpoint(path: Path, target: Target, info: GatheredInfo) -> LoadedState:
    """Reads everything that a rank needs of a checkpoint.

    Raises:
        DamagedError: a file differs from what was written.
        UnfitError: the checkpoint is of another model or optimizer.
    """
    manifest = read_manifest(path)
    step = steps.step_of(path.name)
    if step is not None and step != manifest.step:
        raise DamagedError(f"{MANIFEST}: it is of step {manifest.step}")
    check_fits(target.kinds, manifest.tensors, info.names)
    stages = manifest.holders(target.kinds)
    kept = stages if target.optimizer is not None else []
    parts = [stage for stage in kept if stage.optimizer]
    if kept and not parts:
        raise UnfitError(f"{path} was saved without an optimizer: leave the optimizer out. Nothing was changed")
    files = [file for stage in stages for file in stage.model_files]
    for file in (*files, *(file for stage in parts for file in stage.optimizer_files)):
        verify_file(path / file, manifest.checksum(file))
    training = read_training(path, manifest, info.coordinate, same_random=info.same_random)
    for name in target.others:
        if name not in training:
            raise UnfitError(f"{path} was saved without a {name}: leave {name}= out. Nothing was changed")
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        tensors.update(read_model(path, stage, target.tensors))
    _check_shared(target.stages, tensors)
    restored = None
    if target.optimizer is not None:
        restored = _optimizer(path, manifest, parts, target.optimizer, target.stages)
    notes = notes_on_ranks(manifest, info.coordinate, same_random=info.same_random)
    return LoadedState(manifest.step, tensors, restored, training, notes)


def read_model(path: Path, stage: SavedStage, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parameters and buffers of a stage that have one of these names; of those that are DTensors, the local part.

    Args:
        path: of the checkpoint.
        stage: whose.
        like: the tensors into which they are loaded, by name.
    """
    found = {}
    with open_stage(path, stage.model_file, stage.sharded, shards_of(stage.sharded)) as opened:
        for name in stage.tensors:
            if name in like:
                tensor = opened.read(stage.aliases.get(name, name))
                if Kind.of(tensor) != stage.tensors[name]:
                    file = stage.model_file()
                    raise DamagedError(
                        f"{file}: {name} is {Kind.of(tensor)}, and {MANIFEST} says {stage.tensors[name]}"
                    )
                found[name] = own_part(tensor, like[name])
    return found


def _optimizer(
    path: Path, manifest: Manifest, stages: list[SavedStage], optimizer: Optimizer, here: Stages
) -> Restored:
    with contextlib.ExitStack() as files:
        parts = []
        for stage in stages:
            values, sharded = optimizer_values(stage.stage), stage.sharded_state
            opened = files.enter_context(open_stage(path, stage.optimizer_file, sharded, shards_of(sharded)))
            parts.append(SavedOptimizerShard.of(values, read_json(path, manifest, values), opened.read))
        return restore(optimizer, here, parts)


def _check_shared(stages: Stages, tensors: dict[str, Tensor]) -> None:
    """Refuses different contents for one tensor that has several names."""
    first: dict[int, str] = {}
    for name, tensor in ((name, tensor) for held in stages.values() for name, tensor in held.items()):
        known = first.setdefault(id(tensor), name)
        # As bytes, so that NaN equals NaN.
        if known != name and not torch.equal(*(tensors[each].reshape(-1).view(torch.uint8) for each in (known, name))):
            raise UnfitError(
                f"{known} and {name} are one tensor in the pipe and differ in the checkpoint: tie them after loading, "
                "or load into a pipe where they are not tied. Nothing was changed"
            )
