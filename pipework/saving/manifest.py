"""The table of contents of a checkpoint: which stage has which tensors, and the seal of every file."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import torch

import pipework
from pipework.saving.files import DamagedError, Seal, UnfitError, read_sealed, read_small, seal_of
from pipework.saving.stages import plain_name
from pipework.saving.tensor_files import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT: Final = "pipework checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
COMPLETE: Final = "COMPLETE"
TRAINING: Final = "training"  # of the whole run: the scheduler, random numbers


def model_file(stage: int) -> str:
    """Where a stage's parameters and buffers are.

    Example:
        >>> model_file(3)
        'model-stage-00003.safetensors'
    """
    return f"model-stage-{stage:05d}.safetensors"


def optimizer_files(stage: int) -> tuple[str, str]:
    """Where the state of a stage's optimizer is: its tensors, and all else."""
    return f"optimizer-stage-{stage:05d}.safetensors", f"optimizer-stage-{stage:05d}.json"


def training_files(rank: int) -> tuple[str, str]:
    """Where the state of the run is that a rank wrote: its tensors, and all else.

    Example:
        >>> training_files(0), training_files(2)[1]
        (('training.safetensors', 'training.json'), 'training-rank-00002.json')
    """
    name = f"{TRAINING}-rank-{rank:05d}" if rank else TRAINING
    return f"{name}.safetensors", f"{name}.json"


@dataclass(frozen=True)
class SavedStage:
    """What was saved of a stage.

    Attributes:
        stage: its number.
        rank: which process wrote it.
        tensors: all names and what is under them.
        aliases: from the further names of a tensor to the one that it has in the file.
        optimizer: whether there is a state of an optimizer.
    """

    stage: int
    rank: int
    tensors: Mapping[str, Kind]
    aliases: Mapping[str, str]
    optimizer: bool

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "stage": self.stage,
            "rank": self.rank,
            "tensors": self.tensors,
            "aliases": self.aliases,
            "optimizer": self.optimizer,
        }

    @classmethod
    def from_json(cls, value: Any) -> SavedStage:
        """The same from a JSON value; what was compiled where it was written has its plain name, too."""
        kinds = {
            str(name): Kind(str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in value["tensors"].items()
        }
        first = {str(name): str(first) for name, first in value["aliases"].items()}
        in_file = {plain_name(name): first.get(name, name) for name in kinds}
        return cls(
            int(value["stage"]),
            int(value["rank"]),
            {plain_name(name): kind for name, kind in kinds.items()},
            {name: there for name, there in in_file.items() if name != there},
            bool(value["optimizer"]),
        )


@dataclass(frozen=True)
class Manifest:
    """The table of contents.

    Attributes:
        step: when it was saved.
        ranks: how many processes wrote it.
        replicas: how many equal pipes they were.
        stages: in order.
        files: the seals by name.
    """

    step: int
    ranks: int
    replicas: int
    stages: tuple[SavedStage, ...]
    files: Mapping[str, Seal]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        value = {
            "format": FORMAT,
            "version": VERSION,
            "libraries": _libraries(),
            "step": self.step,
            "ranks": self.ranks,
            "replicas": self.replicas,
            "stages": [stage.to_json() for stage in self.stages],
            "files": {name: seal._asdict() for name, seal in sorted(self.files.items())},
        }
        return json.dumps(value, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """The same from the content of a file.

        Raises:
            DamagedError: it is no manifest.
            UnfitError: its format is newer than this version of pipework.
        """
        try:
            value = json.loads(content)
            known, version, writer = value["format"] == FORMAT, value["version"], value["libraries"]["pipework"]
            newer = known and version > VERSION
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise _no_manifest(error) from error
        if newer:
            raise UnfitError(
                f"the checkpoint has format {version}, written by pipework {writer}, and pipework "
                f"{pipework.__version__} knows formats up to {VERSION}: install a newer pipework"
            )
        if not known:
            raise _no_manifest(ValueError(f"its format is {value['format']!r}"))
        try:
            ranks, replicas = int(value["ranks"]), int(value.get("replicas", 1))
            if not 1 <= replicas <= ranks or ranks % replicas:
                raise ValueError(f"{ranks} ranks cannot be {replicas} replicas")
            return cls(
                int(value["step"]),
                ranks,
                replicas,
                tuple(SavedStage.from_json(stage) for stage in value["stages"]),
                {name: Seal(int(seal["bytes"]), str(seal["sha256"])) for name, seal in value["files"].items()},
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _no_manifest(error) from error

    @property
    def tensors(self) -> dict[str, Kind]:
        """What is under each name, of all stages."""
        return {name: kind for stage in self.stages for name, kind in stage.tensors.items()}

    def seal(self, file: str) -> Seal:
        """The seal of a file that should be there.

        Raises:
            DamagedError: the manifest does not know it.
        """
        if file not in self.files:
            raise DamagedError(f"{MANIFEST}: it does not list {file}")
        return self.files[file]

    def holders(self, names: Iterable[str]) -> list[SavedStage]:
        """The stages that have one of these names."""
        wanted = set(names)
        return [stage for stage in self.stages if not wanted.isdisjoint(stage.tensors)]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint that was completed.

    Raises:
        DamagedError: it is not what was completed.
        UnfitError: its format is newer than this version of pipework.
    """
    mark, content = read_small(directory / COMPLETE), read_small(directory / MANIFEST)
    if mark != completion(content):
        raise DamagedError(f"{MANIFEST}: it is not the one that {COMPLETE} stands for (another SHA-256)")
    return Manifest.from_bytes(content)


def completion(manifest: bytes) -> bytes:
    """The content of the file that marks a checkpoint as complete."""
    return seal_of(manifest).sha256.encode() + b"\n"


def read_json(directory: Path, manifest: Manifest, file: str) -> Any:
    """The value in a JSON file.

    Raises:
        DamagedError: it is not what was written.
    """
    content = read_sealed(directory / file, manifest.seal(file))
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file}: this is no JSON ({error})") from error


def _no_manifest(error: Exception) -> DamagedError:
    return DamagedError(f"{MANIFEST}: this is no manifest of a checkpoint ({type(error).__name__}: {error})")


def _libraries() -> dict[str, str]:
    return {
        "pipework": pipework.__version__,
        "torch": torch.__version__,
        "safetensors": metadata.version("safetensors"),
        "python": platform.python_version(),
    }
