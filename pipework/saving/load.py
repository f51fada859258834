"""Loads the newest checkpoint that every rank can read. Nothing changes before all of it was read and checked."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipework.model.state_names import state_tensors
from pipework.saving import steps
from pipework.saving.collective import MeshCoordinate, process_group_of, run_on_all_ranks
from pipework.saving.files import DamagedError
from pipework.saving.manifest import COMPLETE
from pipework.saving.optimizer import check_optimizer
from pipework.saving.random_states import random_states, set_random_states
from pipework.saving.reading import GatheredInfo, LoadedState, Target, read_checkpoint
from pipework.saving.stages import plain_name, stages_of
from pipework.saving.tensor_files import require_safetensors
from pipework.saving.training import POSITION, RANDOM, TrainingState
from pipework.values.dtensor import local_part

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch.optim import Optimizer

    import pipework
    from pipework.backend import ProcessGroupView


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
    target, gathered = run_on_all_ranks(
        group,
        "prepare to load",
        lambda: _target(pipe, optimizer, {"scheduler": scheduler, "scaler": scaler}),
        share=lambda target: {
            "names": list(target.kinds),
            "random": TrainingState.of({RANDOM: random_states()}).digests,
        },
    )
    coordinate = MeshCoordinate.of(group)
    info = GatheredInfo(
        coordinate,
        {name for each in gathered for name in each["names"]},
        same_random=all(each["random"] == gathered[0]["random"] for each in gathered[:: coordinate.workers]),
    )
    candidates = run_on_all_ranks(
        group, "list the checkpoints", lambda: _candidates(place) if group.rank == 0 else [], share=lambda found: found
    ).shared[0]
    damaged: list[str] = []
    for name in candidates:
        path = place / name
        content = _read(group, path, target, info, damaged)
        if content is not None:
            _take_over(group, pipe, target, content)
            logging.getLogger("pipework").info("resuming from %s", path)
            for level, note in content.notes if group.rank == 0 else []:
                logging.getLogger("pipework").log(level, "%s: %s", path, note)
            return Checkpoint(path, content.step, content.training[POSITION])
    if damaged:
        raise OSError("\n".join([f"no checkpoint in {place} is intact; restore one of", *damaged]))
    return None


def _target(pipe: pipework.Pipe, optimizer: Optimizer | None, others: dict[str, Any]) -> Target:
    require_safetensors()
    if optimizer is not None:
        check_optimizer(optimizer)
    given = {name: each for name, each in others.items() if each is not None}
    for name, each in given.items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise TypeError(f"{name} must have state_dict() and load_state_dict(), got a {type(each).__name__}")
    return Target(stages_of(pipe, to_load=True), optimizer, given)


def _candidates(place: Path) -> list[str]:
    """The names of complete checkpoints, the newest first; "." if the directory itself is one."""
    if steps.is_complete(place):
        return ["."]
    if steps.step_of(place.name) is not None and place.is_dir():
        raise OSError(f"{place} is not a complete checkpoint: {COMPLETE} is missing. Give the directory that it is in")
    found = steps.saved_steps(place)
    for path in found:
        if not steps.is_complete(path):
            logging.getLogger("pipework").warning(
                "%s is passed over: %s is missing, because saving was interrupted or the file was removed",
                path,
                COMPLETE,
            )
    return [path.name for path in found if steps.is_complete(path)]


def _read(
    group: ProcessGroupView, path: Path, target: Target, info: GatheredInfo, damaged: list[str]
) -> LoadedState | None:
    """Reads what this rank needs. None: a file that some rank needs is damaged, which is appended to `damaged`."""

    def read() -> tuple[LoadedState | None, str]:
        try:
            return read_checkpoint(path, target, info), ""
        except DamagedError as error:
            return None, str(error)

    (content, _), faults = run_on_all_ranks(group, f"load {path}", read, share=lambda result: result[1])
    seen = [
        f"{each} (seen by rank {group.everyone[rank]})" if len(group.everyone) > 1 else each
        for rank, each in enumerate(faults)
        if each
    ]
    if not seen:
        return content
    damaged.append(f"{path}: {'; '.join(seen)}")
    logging.getLogger("pipework").warning("a damaged checkpoint is passed over, %s", damaged[-1])
    return None


def _copy(pipe: pipework.Pipe, target: Target, content: LoadedState) -> None:
    with torch.no_grad():
        for tensors in target.stages.values():
            for name, tensor in tensors.items():
                local_part(tensor).copy_(content.tensors[name])
        for part in pipe.partitions:  # several parts of a model may have a copy of a buffer
            for name, (_, *copies) in state_tensors(part).items():
                for tensor in copies:
                    tensor.copy_(content.tensors.get(plain_name(name), tensor))


def _take_over(group: ProcessGroupView, pipe: pipework.Pipe, target: Target, content: LoadedState) -> None:
    """Changes everything or nothing: first the steps that may fail and can be undone, then the plain copies."""
    undo: list[Callable[[], None]] = []
    with contextlib.ExitStack() as memory:

        def load_states() -> None:
            # This comes first: an optimizer puts its state on the device of its parameters.
            memory.enter_context(pipe._filling())
            undo.append(functools.partial(set_random_states, random_states()))
            if RANDOM in content.training:
                set_random_states(content.training[RANDOM])
            if content.optimizer is not None:
                undo.append(content.optimizer.apply())
            for name, each in target.others.items():
                undo.append(functools.partial(each.load_state_dict, copy.deepcopy(each.state_dict())))
                each.load_state_dict(content.training[name])

        try:
            run_on_all_ranks(group, "take over the state", load_states)
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        run_on_all_ranks(group, "copy what was saved into the layers", functools.partial(_copy, pipe, target, content))
        run_on_all_ranks(group, "initialise what no checkpoint has", memory.close)
    if RANDOM in content.training:
        set_random_states(content.training[RANDOM])  # again: initialisation may have drawn random numbers
