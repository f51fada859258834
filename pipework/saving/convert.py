"""Converts a checkpoint of any number of stages to one file of the un-partitioned model."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pipework.saving.files import is_complete, read_sealed, sync_directory
from pipework.saving.manifest import Manifest
from pipework.saving.tensor_files import write_by_name

if TYPE_CHECKING:
    from torch import Tensor


class Converted(NamedTuple):
    """The number of tensors and bytes written, and the step that they are of."""

    tensors: int
    bytes: int
    step: int


def convert(checkpoint: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> Converted:
    """Writes the model of a checkpoint as one safetensors file, under the names that its state dict has.

    Any program that reads safetensors can read it, and `module.load_state_dict(safetensors.torch.load_file(out))` loads
    it. No more than one tensor is in memory at a time.

    Args:
        checkpoint: the directory of a step.
        out: the file.
        force: replace an existing file, once the new one is complete.

    Raises:
        ImportError: safetensors is not installed.
        ValueError: `checkpoint` is not the directory of a step.
        FileExistsError: the file exists; nothing was changed.
        OSError: the checkpoint is damaged, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from torch import nn
        >>> from pipework import Pipe, save_checkpoint
        >>> pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 4, balance=[1, 1], devices=["cpu", "cpu"])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     path = save_checkpoint(directory, pipe, step=12)
        ...     convert(path, path.parent / "model.safetensors").tensors
        4
    """
    source, target = Path(checkpoint), Path(out)
    if os.path.lexists(target) and not force:
        raise FileExistsError(
            f"{target} is there already: choose another name, or say that it is to be replaced, by --force on the "
            "command line or force=True in Python. Nothing was changed"
        )
    if not is_complete(source):
        raise ValueError(f"{source} is not the directory of a complete checkpoint: give one, such as .../step-00000012")
    manifest = Manifest.from_bytes(read_sealed(source))
    partial = target.with_name(target.name + ".tmp")
    with contextlib.ExitStack() as files:
        stage_of = {name: stage for stage in manifest.stages for name in stage.tensors}
        read = {stage.stage: files.enter_context(manifest.open(source, stage, "model")) for stage in manifest.stages}

        def get(name: str) -> Tensor:
            stage = stage_of[name]
            return read[stage.stage](stage.aliases.get(name, name))

        try:
            size = write_by_name(partial, manifest.tensors, get).bytes
            os.rename(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    sync_directory(target.parent)
    return Converted(len(manifest.tensors), size, manifest.step)
