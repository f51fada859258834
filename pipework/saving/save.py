"""Saves a checkpoint: every rank writes its stages, then rank 0 writes the manifest and renames the directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pipework.saving import files
from pipework.saving.collective import process_group_of, run_on_all_ranks
from pipework.saving.files import COMPLETE, Checksum, write_file
from pipework.saving.manifest import Manifest, SavedStage, optimizer_values, stage_file, training_files
from pipework.saving.optimizer import OptimizerShard, collect_state, split_by_stage
from pipework.saving.stages import Stages, aliases, stages_of
from pipework.saving.tensor_files import Kind, divide, require_safetensors, write_tensors
from pipework.saving.training import POSITION, RANDOM, TrainingState, random_states, with_state

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    import pipework
    from pipework.backend import ProcessGroupView
    from pipework.saving.manifest import What
    from pipework.saving.tensor_files import Sharded


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
    """Saves the state of a training between two steps of the optimizer, so that it can resume exactly.

    It saves the parameters and buffers, the optimizer's state, the states of the random generators, and the other
    arguments. States are stored by names of parameters, so that any number of stages and any schedule can load them. A
    checkpoint is complete or absent: a crash or a full disk while saving leaves the earlier ones unchanged.

    If workers are processes, all of them call this with their own arguments. The parameters, buffers and the
    optimizer's state are those of the first replica: all replicas have the same, except for statistics such as batch
    norm's. The random states, `scheduler`, `scaler` and `data_position` are saved for each process. A process that gave
    no `scheduler`, `scaler` or `data_position` gets the one of its replica's first process when it loads.

    Args:
        directory: of the run's checkpoints; the new checkpoint becomes a directory in it.
        pipe: the pipe that is trained.
        optimizer: of all or some of the pipe's parameters, in any groups.
        step: the number of steps that were done. A checkpoint of the same step is replaced.
        scheduler: of the learning rate, or another object with a `state_dict()` of numbers, strings, lists, tuples,
            dicts and tensors.
        scaler: a `torch.amp.GradScaler`, or likewise.
        data_position: how far the data were read: any JSON value, which may contain tuples and tensors. Each replica
            has its own.
        keep: the number of checkpoints to keep: older ones are removed once this one is complete. None: keep all.

    Returns:
        The new directory, such as `directory/step-00000012`.

    Raises:
        ImportError: safetensors is not installed; the extra `checkpoint` brings it.
        TypeError: something cannot be saved; nothing was written.
        ValueError: an argument is invalid, or the optimizer has parameters that are not the pipe's.
        OSError: the checkpoint cannot be written; its files were removed.

    Example:
        >>> import tempfile, torch
        >>> from torch import nn
        >>> from pipework import Pipe, load_checkpoint, save_checkpoint
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 4, balance=[1, 1], devices=["cpu", "cpu"])
        >>> optimizer = torch.optim.Adam(pipe.parameters())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = save_checkpoint(directory, pipe, optimizer, step=12, data_position={"epoch": 1})
        ...     print(path.name, load_checkpoint(directory, pipe, optimizer).data_position)
        step-00000012 {'epoch': 1}
    """
    group = process_group_of(pipe)
    run_on_all_ranks(group, "collect the state of the optimizer", lambda: collect_state(optimizer))
    ready = run_on_all_ranks(
        group,
        "prepare to save",
        lambda: _prepare(pipe, optimizer, step, keep, {"scheduler": scheduler, "scaler": scaler}, data_position),
        share=lambda prepared: {"step": step, "training": prepared.training.digests},
    )
    gathered_steps = [each["step"] for each in ready.shared]
    if len(set(gathered_steps)) > 1:
        raise ValueError(f"the ranks save different steps, {gathered_steps}: all must call save_checkpoint at the same")
    training = ready.own.training
    if group.worker:  # the replica's first rank writes the states that all of its ranks have
        training = training.different_from(ready.shared[group.rank - group.worker]["training"])
    place = Path(directory)
    partial = place / f"{files.step_name(step)}.tmp"
    try:
        run_on_all_ranks(group, "make a directory", lambda: files.begin(place, step) if group.rank == 0 else None)
        written = run_on_all_ranks(
            group, "write its stages", lambda: _write(partial, ready.own, training, group), share=lambda table: table
        )
        run_on_all_ranks(group, "complete the checkpoint", lambda: _complete(partial, step, written.shared, group))
    except Exception:
        if group.rank == 0:  # no rank writes any more: all have got the failure
            files.discard(partial)
        raise
    final = place / files.step_name(step)
    run_on_all_ranks(group, "see the checkpoint", lambda: files.wait_for(final / COMPLETE))
    if group.rank == 0:
        files.clear(final, keep)
    return final


class _Prepared(NamedTuple):
    """Everything that this rank will write, checked."""

    stages: Stages
    optimizer: dict[int, OptimizerShard]
    training: TrainingState


def _prepare(
    pipe: pipework.Pipe, optimizer: Optimizer | None, step: int, keep: int | None, others: dict[str, Any], position: Any
) -> _Prepared:
    require_safetensors()
    for name, number, least in (("step", step, 0), ("keep", 1 if keep is None else keep, 1)):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {number!r}")
    states = {POSITION: position, RANDOM: random_states()}
    states.update({name: each.state_dict() for name, each in with_state(**others).items()})
    stages = stages_of(pipe)
    return _Prepared(stages, split_by_stage(optimizer, stages, pipe.ranks.shard), TrainingState.of(states))


def _write(partial: Path, prepared: _Prepared, training: TrainingState, group: ProcessGroupView) -> dict[str, Any]:
    """Writes this rank's files.

    Returns:
        As JSON: the stages and files, and whether it wrote whole tensors, or parts of tensors only.
    """
    files.wait_for(partial)
    first = group.shard == 0
    stages: list[dict[str, Any]] = []
    written: dict[str, Checksum] = {}

    def write(file: str, tensors: Mapping[str, Tensor]) -> None:
        written[file] = write_tensors(partial / file, tensors)

    def write_values(file: str, value: Any) -> None:
        written[file] = write_file(partial / file, [json.dumps(value, indent=1, allow_nan=False).encode()])

    for number, tensors in prepared.stages.items():
        same = aliases(tensors)
        state = prepared.optimizer.get(number)
        model = divide({name: tensor for name, tensor in tensors.items() if name not in same}, group)
        parts = divide({} if state is None else state.tensors, group)
        if first or model.tensors:
            write(stage_file("model", number, group.shard), model.tensors)
        if state is not None and (first or parts.tensors):
            write(stage_file("optimizer", number, group.shard), parts.tensors)
        if state is not None and first:
            write_values(optimizer_values(number), state.values)
        if first or model.sharded or parts.sharded:
            kinds = {name: Kind.of(tensor) for name, tensor in tensors.items()}
            shards: Mapping[What, Mapping[str, Sharded]] = {"model": model.sharded, "optimizer": parts.sharded}
            stages.append(SavedStage(number, group.rank, kinds, same, state is not None, shards).to_json())
    if training.values:
        tensors_file, values_file = training_files(group.rank)
        write(tensors_file, training.all_tensors)
        write_values(values_file, training.values)
    return {"stages": stages, "files": written, "whole": first}


def _complete(partial: Path, step: int, gathered: list[Any], group: ProcessGroupView) -> None:
    """Writes the manifest of the files of all ranks, on rank 0."""
    if group.rank != 0:
        return
    stages: dict[int, SavedStage] = {}
    for written in sorted(gathered, key=lambda each: not each["whole"]):
        for each in map(SavedStage.from_json, written["stages"]):
            stages[each.stage] = stages[each.stage].with_shards(each) if each.stage in stages else each
    checksums = {name: Checksum(*each) for written in gathered for name, each in written["files"].items()}
    ordered = tuple(stages[number] for number in sorted(stages))
    files.finish(partial, Manifest(step, len(group.everyone), group.replicas, ordered, checksums).to_bytes())
