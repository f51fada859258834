"""Saving: every rank writes what it holds, then rank 0 seals it all and gives the directory its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipework.saving import steps
from pipework.saving.files import Seal, write_file
from pipework.saving.manifest import (
    COMPLETE,
    MANIFEST,
    Manifest,
    SavedStage,
    completion,
    model_file,
    optimizer_files,
    training_files,
)
from pipework.saving.optimizer import Part, take_apart
from pipework.saving.random_states import random_states
from pipework.saving.ranks import Seat, ranks_of, together
from pipework.saving.stages import Stages, aliases, stages_of
from pipework.saving.tensor_files import Kind, require_safetensors, write_tensors
from pipework.saving.training import POSITION, RANDOM, Packed

if TYPE_CHECKING:
    import os

    from torch import Tensor
    from torch.optim import Optimizer

    import pipework
    from pipework.saving.ranks import Ranks


def save_checkpoint(
    directory: str | os.PathLike[str],
    pipe: pipework.Pipe,  # in full, as the reference has several of that name
    optimizer: Optimizer | None = None,
    *,
    step: int,
    scheduler: Any = None,
    scaler: Any = None,
    data_position: Any = None,
    keep: int | None = None,
) -> Path:
    """Saves all that a training needs to go on as if it had never stopped, between two steps of the optimizer.

    Parameters and buffers, the optimizer's state, the states of the random generators, and what else is given. The
    files say which parameter each number belongs to, so that any number of stages and any schedule can go on with them.
    A checkpoint is there as a whole or not at all: a crash or a full disk while saving leaves the earlier ones as they
    are.

    If workers are processes, each of them calls this and gives its own. The parameters, buffers and the optimizer's
    state are those of the first replica, as all replicas have the same (but for statistics such as batch norm's, of
    which the first replica's are saved). The random states, `scheduler`, `scaler` and `data_position` are saved of each
    process; those that have none of one of the latter get their replica's when they load.

    Args:
        directory: of the run's checkpoints; this one becomes a directory in it.
        pipe: what is trained.
        optimizer: of the pipe's parameters, all or some, in any groups.
        step: how many steps were done. If there is a checkpoint of this step, it is replaced.
        scheduler: of the learning rate, or anything else with a `state_dict()` of numbers, strings, lists, tuples,
            dicts and tensors.
        scaler: a `torch.amp.GradScaler`, or likewise.
        data_position: how far the data were read, to begin there again: any JSON value, and tuples and tensors in it.
            Each replica has its own.
        keep: how many checkpoints there may be: older ones are removed once this one is complete. None: all stay.

    Returns:
        The new directory, such as `directory/step-00000012`.

    Raises:
        ImportError: safetensors is not installed; the extra `checkpoint` brings it.
        TypeError: something cannot be saved; nothing was written.
        ValueError: an argument makes no sense, or the optimizer has parameters that are not the pipe's.
        OSError: it cannot be written; nothing is left of it.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from pipework import Pipe, load_checkpoint, save_checkpoint
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), balance=[1, 1], devices=["cpu", "cpu"])
        >>> optimizer = torch.optim.Adam(pipe.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = save_checkpoint(directory, pipe, optimizer, step=12, data_position={"epoch": 1})
        ...     print(path.name, load_checkpoint(directory, pipe, optimizer).data_position)
        step-00000012 {'epoch': 1}
    """
    ranks = ranks_of(pipe)
    ready = together(
        ranks,
        "prepare to save",
        lambda: _gather(pipe, optimizer, step, keep, _extras(scheduler, scaler, data_position)),
        say=lambda gathered: {"step": step, "training": gathered.training.digests},
    )
    said_steps = [each["step"] for each in ready.said]
    if len(set(said_steps)) > 1:
        raise ValueError(f"the ranks save different steps, {said_steps}: all must call save_checkpoint at the same")
    seat = Seat.of(ranks)
    training = ready.mine.training
    if seat.worker:  # the replica's first rank writes what they have in common
        training = training.beside(ready.said[ranks.rank - seat.worker]["training"])
    place = Path(directory)
    partial = place / f"{steps.step_name(step)}.tmp"
    try:
        together(ranks, "make a directory", lambda: steps.begin(place, step) if ranks.rank == 0 else None)
        written = together(
            ranks, "write its stages", lambda: _write(partial, ready.mine, training, ranks), say=_Written.to_json
        )
        together(ranks, "complete the checkpoint", lambda: _seal(partial, step, written.said, ranks))
    except Exception:
        if ranks.rank == 0:  # no other rank writes any more: all are told of the failure
            steps.discard(partial)
        raise
    final = place / steps.step_name(step)
    together(ranks, "see the checkpoint", lambda: steps.wait_for(final / COMPLETE))
    if ranks.rank == 0:
        steps.clear(final, keep)
    return final


@dataclass(frozen=True)
class _Gathered:
    """All that this rank will write, checked."""

    stages: Stages
    optimizer: dict[int, Part]
    training: Packed


@dataclass(frozen=True)
class _Written:
    """What this rank wrote."""

    stages: list[SavedStage]
    files: dict[str, Seal]

    def to_json(self) -> dict[str, Any]:
        return {"stages": [stage.to_json() for stage in self.stages], "files": self.files}


def _extras(scheduler: Any, scaler: Any, data_position: Any) -> dict[str, Any]:
    extras = {"scheduler": scheduler, "scaler": scaler}
    return {**{name: each for name, each in extras.items() if each is not None}, POSITION: data_position}


def _gather(
    pipe: pipework.Pipe,
    optimizer: Optimizer | None,
    step: int,
    keep: int | None,
    extras: dict[str, Any],
) -> _Gathered:
    require_safetensors()
    for name, number, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    stages = stages_of(pipe)
    parts = {} if optimizer is None else take_apart(optimizer, stages)
    states = {name: each if name == POSITION else _state_of(name, each) for name, each in extras.items()}
    return _Gathered(stages, parts, Packed.of({**states, RANDOM: random_states()}))


def _state_of(name: str, thing: Any) -> Any:
    if not hasattr(thing, "state_dict"):
        raise TypeError(f"{name} must have a state_dict(), got a {type(thing).__name__}")
    return thing.state_dict()


def _write(partial: Path, gathered: _Gathered, training: Packed, ranks: Ranks) -> _Written:
    """Writes this rank's files."""
    steps.wait_for(partial)
    written = _Written([], {})
    if ranks.replica == 0:
        for number, tensors in gathered.stages.items():
            same = aliases(tensors)
            own = {name: tensor for name, tensor in tensors.items() if name not in same}
            written.files[model_file(number)] = write_tensors(partial / model_file(number), own)
            part = gathered.optimizer.get(number)
            if part is not None:
                pair = optimizer_files(number)
                written.files.update(_write_pair(partial, pair, part.to_json(), part.tensors))
            kinds = {name: Kind.of(tensor) for name, tensor in tensors.items()}
            written.stages.append(SavedStage(number, ranks.rank, kinds, same, optimizer=part is not None))
    if training.values:
        pair = training_files(ranks.rank)
        written.files.update(_write_pair(partial, pair, training.values, training.all_tensors))
    return written


def _write_pair(directory: Path, names: tuple[str, str], value: Any, tensors: dict[str, Tensor]) -> dict[str, Seal]:
    """Writes plain values and the tensors that belong to them."""
    content = json.dumps(value, indent=1, allow_nan=False).encode()
    return {
        names[0]: write_tensors(directory / names[0], tensors),
        names[1]: write_file(directory / names[1], [content]),
    }


def _seal(partial: Path, step: int, said: list[Any], ranks: Ranks) -> None:
    """Makes a checkpoint of what all ranks wrote."""
    if ranks.rank != 0:
        return
    stages = sorted(
        (SavedStage.from_json(each) for word in said for each in word["stages"]), key=lambda stage: stage.stage
    )
    if [stage.stage for stage in stages] != list(range(len(stages))):
        found = [f"{stage.stage} (rank {stage.rank})" for stage in stages]
        raise ValueError(f"wanted each stage from one rank, got stages {', '.join(found)}")
    files = {name: Seal(*seal) for word in said for name, seal in word["files"].items()}
    content = Manifest(step, ranks.size, ranks.replicas, tuple(stages), files).to_bytes()
    write_file(partial / MANIFEST, [content])
    steps.finish(partial, completion(content))
