"""Loading: the newest checkpoint that is whole on every rank, read and compared before anything is changed."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pipework.saving import steps
from pipework.saving.files import DamagedError
from pipework.saving.manifest import COMPLETE
from pipework.saving.optimizer import check_optimizer
from pipework.saving.random_states import random_states, set_random_states
from pipework.saving.ranks import Seat, ranks_of, together
from pipework.saving.reading import Content, Others, Target, read_content
from pipework.saving.stages import stages_of
from pipework.saving.tensor_files import require_safetensors
from pipework.saving.training import POSITION, RANDOM, Packed

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from torch.optim import Optimizer

    import pipework
    from pipework.saving.ranks import Ranks


@dataclass(frozen=True)
class Checkpoint:
    """What was loaded.

    Attributes:
        path: the directory of the checkpoint.
        step: how many steps were done.
        data_position: what was given when it was saved, by this process or else in its replica.
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
    """Goes on from the newest checkpoint in a directory, which any number of stages may have written.

    All files that are needed are read and compared with their checksums first. If one is damaged, that is logged as a
    warning to "pipework", and the checkpoint before is taken. Nothing changes unless everything is there and fits.
    The random generators of PyTorch, Python and numpy go on where they were, too.

    If workers are processes, all of them call this. Each gets the random states, the `data_position` and the states of
    `scheduler` and `scaler` that it saved itself; those of its replica's first process if the replica has another
    number of processes now. If there are more replicas than there were, the further ones get all this of replica 0, but
    for the random states if the script has seeded replicas differently: then they keep their own. With fewer replicas,
    the last ones' is left out. Another number of replicas is logged as a warning.

    Args:
        directory: of the run's checkpoints; or that of one of them, which is then the only one to be taken.
        pipe: gets the parameters and buffers. Layers on the meta device get memory with them: they need not be
            initialised.
        optimizer: gets its state, with the options of its groups such as the learning rate. None: what the checkpoint
            has of one is left alone, as are `scheduler` and `scaler` if they are None.
        scheduler: gets its state by `load_state_dict()`.
        scaler: likewise.

    Returns:
        What was loaded; None if the directory has no checkpoint, so that a script can call this whenever it starts.

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
        ...     return Pipe(module, balance=balance, devices=["cpu"] * len(balance))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     print(load_checkpoint(directory, pipe(1, 1, 1)))
        ...     path = save_checkpoint(directory, pipe(1, 1, 1), step=12)
        ...     print(load_checkpoint(directory, pipe(2, 1)).step)
        None
        12
    """
    ranks = ranks_of(pipe)
    place = Path(directory)
    target, said = together(
        ranks,
        "prepare to load",
        lambda: _target(pipe, optimizer, {"scheduler": scheduler, "scaler": scaler}),
        say=lambda target: {"names": list(target.kinds), "random": Packed.of({RANDOM: random_states()}).digests},
    )
    seat = Seat.of(ranks)
    others = Others(
        seat,
        {name for each in said for name in each["names"]},
        alike=all(each["random"] == said[0]["random"] for each in said[:: seat.workers]),
    )
    candidates = together(
        ranks, "list the checkpoints", lambda: _candidates(place) if ranks.rank == 0 else [], say=lambda found: found
    ).said[0]
    damaged: list[str] = []
    for name in candidates:
        path = place / name
        content = _read(ranks, path, target, others, damaged)
        if content is not None:
            _take_over(ranks, pipe, target, content)
            logging.getLogger("pipework").info("going on from %s", path)
            for level, note in content.notes if ranks.rank == 0 else []:
                logging.getLogger("pipework").log(level, "%s: %s", path, note)
            return Checkpoint(path, content.step, content.training[POSITION])
    if damaged:
        raise OSError("\n".join([f"no checkpoint in {place} is whole; restore one of", *damaged]))
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


def _read(ranks: Ranks, path: Path, target: Target, others: Others, damaged: list[str]) -> Content | None:
    """Reads what this rank needs; None if what one of the ranks needs is damaged, which is noted."""

    def read() -> tuple[Content | None, str]:
        try:
            return read_content(path, target, others), ""
        except DamagedError as error:
            return None, str(error)

    (content, _), faults = together(ranks, f"load {path}", read, say=lambda result: result[1])
    seen = [
        f"{each} (seen by rank {ranks.everyone[rank]})" if ranks.size > 1 else each
        for rank, each in enumerate(faults)
        if each
    ]
    if not seen:
        return content
    damaged.append(f"{path}: {'; '.join(seen)}")
    logging.getLogger("pipework").warning("a damaged checkpoint is passed over, %s", damaged[-1])
    return None


def _copy(target: Target, content: Content) -> None:
    with torch.no_grad():
        for tensors in target.stages.values():
            for name, tensor in tensors.items():
                tensor.copy_(content.tensors[name])


def _take_over(ranks: Ranks, pipe: pipework.Pipe, target: Target, content: Content) -> None:
    """Changes everything, or nothing: first what may refuse its state and can be undone, then the plain copies."""
    undo: list[Callable[[], None]] = []
    with contextlib.ExitStack() as memory:

        def what_may_refuse() -> None:
            # First of all, as an optimizer puts its state where its parameters lie.
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
            together(ranks, "take over the state", what_may_refuse)
        except BaseException:
            for step in reversed(undo):
                step()
            raise
        together(ranks, "copy what was saved into the layers", functools.partial(_copy, target, content))
        together(ranks, "initialise what no checkpoint has", memory.close)
    if RANDOM in content.training:
        set_random_states(content.training[RANDOM])  # again, as what was initialised may have drawn
