"""Loads the newest checkpoint that every rank can read. Nothing changes before all of it was read and checked."""

from __future__ import annotations

import contextlib
import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipework.model.state_names import state_tensors
from pipework.saving.collective import process_group_of, run_on_all_ranks
from pipework.saving.files import (
    COMPLETE,
    MANIFEST,
    DamagedError,
    UnfitError,
    is_complete,
    read_sealed,
    saved_steps,
    step_of,
)
from pipework.saving.manifest import Manifest, optimizer_values
from pipework.saving.optimizer import check_optimizer, restore
from pipework.saving.stages import check_fits, plain_name, stages_of
from pipework.saving.tensor_files import Kind, own_part, require_safetensors
from pipework.saving.training import (
    POSITION,
    RANDOM,
    TrainingState,
    random_states,
    read_training,
    set_random_states,
    with_state,
)
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    import os
    from collections.abc import Set

    from torch import Tensor
    from torch.optim import Optimizer

    import pipework
    from pipework.backend import ProcessGroupView
    from pipework.saving.optimizer import Restored
    from pipework.saving.stages import Stages


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded.

    Attributes:
        path: the directory of the checkpoint.
        step: the number of steps that were done.
        data_position: the value that was saved by this process, or else by the first process of its replica.
    """

    path: Path
    step: int
    data_position: Any = None


def load_checkpoint(
    directory: str | os.PathLike[str],
    pipe: pipework.Pipe,  # in full, as the reference has several of that name
    optimizer: Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
) -> Checkpoint | None:
    """Resumes from the newest checkpoint in a directory. It may be of another number of stages.

    All files that are needed are read and compared with their checksums first. If one is damaged, a warning is logged
    to "pipework", and the previous checkpoint is loaded. Nothing changes unless everything is there and fits. The
    states of the random generators of PyTorch, Python and numpy are restored, too.

    If workers are processes, all of them call this. Each gets the random states, the `data_position` and the states of
    `scheduler` and `scaler` that it saved; if the number of processes in a replica has changed, each gets those of its
    replica's first process. If there are more replicas than before, the additional ones get those of replica 0; but
    if the script has seeded replicas differently, they keep their own random states. If there are fewer, the states of
    the last ones are not used. A warning is logged if the number of replicas has changed.

    Args:
        directory: of the run's checkpoints; or the directory of one checkpoint, which is then the only candidate.
        pipe: gets the parameters and buffers. Layers on the meta device get memory, and need not be initialised.
        optimizer: gets its state, and the options of its groups such as the learning rate. None: the optimizer's state
            in the checkpoint is not read. The same holds for `scheduler` and `scaler`.
        scheduler: gets its state by `load_state_dict()`.
        scaler: likewise.

    Returns:
        The checkpoint that was loaded; None if the directory has none, so that a script can call this at every start.

    Raises:
        ImportError: safetensors is not installed; the extra `checkpoint` brings it.
        ValueError: the checkpoint is of another model or optimizer, or of a newer format.
        OSError: there are checkpoints, and all are damaged; the message names the files.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from pipework import Pipe, load_checkpoint, save_checkpoint
        >>> def pipe(*balance):
        ...     module = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        ...     return Pipe(module, 4, balance=balance, devices=["cpu"] * len(balance))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     print(load_checkpoint(directory, pipe(1, 1, 1)))
        ...     path = save_checkpoint(directory, pipe(1, 1, 1), step=12)
        ...     print(load_checkpoint(directory, pipe(2, 1)).step)
        None
        12
    """
    group = process_group_of(pipe)
    place = Path(directory)

    def prepare() -> Target:
        require_safetensors()
        if optimizer is not None:
            check_optimizer(optimizer)
        others = with_state(scheduler=scheduler, scaler=scaler)
        return Target(stages_of(pipe, to_load=True), optimizer, others)

    def share(target: Target) -> Any:
        return {"names": list(target.tensors), "random": TrainingState.of({RANDOM: random_states()}).digests}

    target, gathered = run_on_all_ranks(group, "prepare to load", prepare, share)
    everywhere = {name for each in gathered for name in each["names"]}
    same_random = all(each["random"] == gathered[0]["random"] for each in gathered[:: group.workers])
    candidates = run_on_all_ranks(
        group, "list the checkpoints", lambda: _candidates(place) if group.rank == 0 else [], share=lambda found: found
    ).shared[0]
    damaged: list[str] = []
    logger = logging.getLogger("pipework")
    for path in (place / name for name in candidates):

        def read(path: Path = path) -> tuple[LoadedState | None, str]:
            try:
                return read_checkpoint(path, target, group, everywhere, same_random=same_random), ""
            except DamagedError as error:
                return None, str(error)

        (content, _), faults = run_on_all_ranks(group, f"load {path}", read, share=lambda result: result[1])
        pairs = zip(group.everyone, faults, strict=True)
        seen = [f"{fault} (seen by rank {rank})" if len(faults) > 1 else fault for rank, fault in pairs if fault]
        if content is None or seen:
            damaged.append(f"{path}: {'; '.join(seen)}")
            logger.warning("a damaged checkpoint is passed over, %s", damaged[-1])
            continue
        _take_over(group, pipe, target, content)
        logger.info("resuming from %s", path)
        if content.note and group.rank == 0:
            logger.warning("%s: %s", path, content.note)
        return Checkpoint(path, content.step, content.training[POSITION])
    if damaged:
        raise OSError("\n".join([f"no checkpoint in {place} is intact; restore one of", *damaged]))
    return None


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


@dataclass(frozen=True)
class LoadedState:
    """The contents of a checkpoint that were read into memory and fit.

    Attributes:
        step: the number of steps that were done.
        tensors: parameters and buffers.
        optimizer: the optimizer's state, if there is an optimizer to load into.
        training: the state that belongs to no stage; without random states if this rank is to keep its own.
        note: a message to log, or an empty text.
    """

    step: int
    tensors: dict[str, Tensor]
    optimizer: Restored | None
    training: dict[str, Any]
    note: str


def _candidates(place: Path) -> list[str]:
    """The names of complete checkpoints, the newest first; "." if the directory itself is one."""
    if is_complete(place):
        return ["."]
    if step_of(place.name) is not None and place.is_dir():
        raise OSError(f"{place} is not a complete checkpoint: {COMPLETE} is missing. Give the directory that it is in")
    found = saved_steps(place)
    for path in found:
        if not is_complete(path):
            reason = f"{COMPLETE} is missing, because saving was interrupted or the file was removed"
            logging.getLogger("pipework").warning("%s is passed over: %s", path, reason)
    return [path.name for path in found if is_complete(path)]


def read_checkpoint(
    path: Path, target: Target, group: ProcessGroupView, everywhere: Set[str], *, same_random: bool
) -> LoadedState:
    """Reads everything that a rank needs of a checkpoint. Each file is compared with its checksum before it is opened.

    Args:
        path: of the checkpoint.
        target: what this rank loads into.
        group: this rank among all.
        everywhere: the names of the tensors of all ranks.
        same_random: whether the random generators of all replicas are in the same state.

    Raises:
        DamagedError: a file differs from what was written.
        UnfitError: the checkpoint is of another model or optimizer.
    """
    manifest, like = Manifest.from_bytes(read_sealed(path)), target.tensors
    if step_of(path.name) not in (None, manifest.step):
        raise DamagedError(f"{MANIFEST}: it is of step {manifest.step}")
    check_fits({name: Kind.of(tensor) for name, tensor in like.items()}, manifest.tensors, everywhere)
    stages = [stage for stage in manifest.stages if not like.keys().isdisjoint(stage.tensors)]
    states = [stage for stage in stages if stage.optimizer and target.optimizer is not None]
    if target.optimizer is not None and stages and not states:
        raise UnfitError(f"{path} was saved without an optimizer: leave the optimizer out. Nothing was changed")
    tensors: dict[str, Tensor] = {}
    for stage in stages:
        with manifest.open(path, stage, "model") as read:
            for name in stage.tensors.keys() & like.keys():
                tensor, written = read(stage.aliases.get(name, name)), stage.tensors[name]
                if Kind.of(tensor) != written:
                    file = stage.files("model")[0]
                    raise DamagedError(f"{file}: {name} is {Kind.of(tensor)}, and {MANIFEST} says {written}")
                tensors[name] = own_part(tensor, like[name])
    _check_shared(target.stages, tensors)
    restored = None
    if target.optimizer is not None:
        with contextlib.ExitStack() as opened:
            parts = []
            for stage in states:
                file, tensor_of = optimizer_values(stage.stage), manifest.open(path, stage, "optimizer")
                parts.append((file, manifest.read_json(path, file), opened.enter_context(tensor_of)))
            restored = restore(target.optimizer, target.stages, parts)
    training, note = read_training(path, manifest, group, same_random=same_random)
    if missing := target.others.keys() - training:
        raise UnfitError(f"{path} was saved without a {min(missing)}: leave {min(missing)}= out. Nothing was changed")
    return LoadedState(manifest.step, tensors, restored, training, note)


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


def _take_over(group: ProcessGroupView, pipe: pipework.Pipe, target: Target, content: LoadedState) -> None:
    """Changes everything or nothing: first the steps that may fail and can be undone, then the plain copies."""

    def load_states() -> None:
        # This comes first: an optimizer puts its state on the device of its parameters.
        memory.enter_context(pipe._filling())
        undo.callback(set_random_states, random_states())
        if RANDOM in content.training:
            set_random_states(content.training[RANDOM])
        if content.optimizer is not None:
            undo.callback(content.optimizer.apply())
        for name, each in target.others.items():
            undo.callback(each.load_state_dict, copy.deepcopy(each.state_dict()))
            each.load_state_dict(content.training[name])

    @torch.no_grad()
    def copy_tensors() -> None:
        for name, tensor in target.tensors.items():
            local_part(tensor).copy_(content.tensors[name])
        for part in pipe.partitions:  # several parts of a model may have a copy of a buffer
            for name, (_, *copies) in state_tensors(part).items():
                for tensor in copies:
                    tensor.copy_(content.tensors.get(plain_name(name), tensor))

    with contextlib.ExitStack() as memory:
        with contextlib.ExitStack() as undo:
            run_on_all_ranks(group, "take over the state", load_states)
            undo.pop_all()  # nothing is undone any more
        run_on_all_ranks(group, "copy what was saved into the layers", copy_tensors)
        run_on_all_ranks(group, "initialise what no checkpoint has", memory.close)
    if RANDOM in content.training:
        set_random_states(content.training[RANDOM])  # again: initialisation may have drawn random numbers
