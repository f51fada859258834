"""The table of contents of a checkpoint: the tensors of each stage, and the checksum of every file."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import torch

import pipework
from pipework.saving.files import Checksum, DamagedError, UnfitError, checksum_of, read_small, read_verified
from pipework.saving.shards import Sharded, shards_of
from pipework.saving.stages import plain_name
from pipework.saving.tensor_files import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

FORMAT: Final = "pipework checkpoint"
VERSION: Final = 2
_WHOLE: Final = 1  # the version of a checkpoint in which no tensor is in parts
MANIFEST: Final = "manifest.json"
COMPLETE: Final = "COMPLETE"
TRAINING: Final = "training"  # the states of the scheduler and the scaler, random states, the data position


def model_file(stage: int, shard: int = 0) -> str:
    """The file of a stage's parameters and buffers, or of one shard of them.

    Example:
        >>> model_file(3), model_file(3, 1)
        ('model-stage-00003.safetensors', 'model-stage-00003-shard-00001.safetensors')
    """
    return f"model-stage-{stage:05d}{f'-shard-{shard:05d}' if shard else ''}.safetensors"


def optimizer_file(stage: int, shard: int = 0) -> str:
    """The file of the tensors in the optimizer's state of a stage, or of one shard of them."""
    return f"optimizer-stage-{stage:05d}{f'-shard-{shard:05d}' if shard else ''}.safetensors"


def optimizer_values(stage: int) -> str:
    """The file of all else in the optimizer's state of a stage."""
    return f"optimizer-stage-{stage:05d}.json"


def training_files(rank: int) -> tuple[str, str]:
    """The files of the training state of a rank: for tensors and for JSON.

    Example:
        >>> training_files(0), training_files(2)[1]
        (('training.safetensors', 'training.json'), 'training-rank-00002.json')
    """
    name = f"{TRAINING}-rank-{rank:05d}" if rank else TRAINING
    return f"{name}.safetensors", f"{name}.json"


@dataclass(frozen=True)
class SavedStage:
    """The contents of a saved stage.

    Attributes:
        stage: its number.
        rank: the process that wrote it.
        tensors: dtype and shape by name.
        aliases: maps additional names of a tensor to its name in the file.
        optimizer: whether the optimizer's state was saved.
        sharded: the tensors that are in parts, by their name in the files.
        sharded_state: the same of the optimizer's state.
    """

    stage: int
    rank: int
    tensors: Mapping[str, Kind]
    aliases: Mapping[str, str]
    optimizer: bool
    sharded: Mapping[str, Sharded] = field(default_factory=dict)
    sharded_state: Mapping[str, Sharded] = field(default_factory=dict)

    def model_file(self, shard: int = 0) -> str:
        """See the function of that name."""
        return model_file(self.stage, shard)

    def optimizer_file(self, shard: int = 0) -> str:
        """See the function of that name."""
        return optimizer_file(self.stage, shard)

    @property
    def model_files(self) -> list[str]:
        """All files of parameters and buffers."""
        return list(map(self.model_file, shards_of(self.sharded)))

    @property
    def optimizer_files(self) -> list[str]:
        """All files of tensors of the optimizer's state."""
        return list(map(self.optimizer_file, shards_of(self.sharded_state)))

    def with_shards(self, other: SavedStage) -> SavedStage:
        """With the parts that another process has written."""
        merged = []
        for mine, theirs in ((self.sharded, other.sharded), (self.sharded_state, other.sharded_state)):
            merged.append(
                {**mine, **{n: mine[n].with_parts(each) if n in mine else each for n, each in theirs.items()}}
            )
        return replace(self, sharded=merged[0], sharded_state=merged[1])

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        return {
            "stage": self.stage,
            "rank": self.rank,
            "tensors": self.tensors,
            "aliases": self.aliases,
            "optimizer": self.optimizer,
            **{
                key: {name: each.to_json() for name, each in sharded.items()}
                for key, sharded in (("sharded", self.sharded), ("sharded_state", self.sharded_state))
                if sharded
            },
        }

    @classmethod
    def from_json(cls, value: Any) -> SavedStage:
        """From a JSON value. Names that `torch.compile` made become plain names."""
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
            *(
                {str(name): Sharded.from_json(each) for name, each in value.get(key, {}).items()}
                for key in ("sharded", "sharded_state")
            ),
        )


@dataclass(frozen=True)
class Manifest:
    """The table of contents.

    Attributes:
        step: the number of steps that were done.
        ranks: how many processes wrote it.
        replicas: how many replicas of the pipe they held.
        stages: in order.
        files: the checksums by name.
    """

    step: int
    ranks: int
    replicas: int
    stages: tuple[SavedStage, ...]
    files: Mapping[str, Checksum]

    def to_bytes(self) -> bytes:
        """The content of the file."""
        value = {
            "format": FORMAT,
            "version": VERSION if any(stage.sharded or stage.sharded_state for stage in self.stages) else _WHOLE,
            "libraries": {
                "pipework": pipework.__version__,
                "torch": torch.__version__,
                "safetensors": metadata.version("safetensors"),
                "python": platform.python_version(),
            },
            "step": self.step,
            "ranks": self.ranks,
            "replicas": self.replicas,
            "stages": [stage.to_json() for stage in self.stages],
            "files": {name: checksum._asdict() for name, checksum in sorted(self.files.items())},
        }
        return json.dumps(value, indent=1).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Manifest:
        """From the content of the file.

        Raises:
            DamagedError: the content is no manifest.
            UnfitError: the format is newer than this version of pipework.
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
                {name: Checksum(int(each["bytes"]), str(each["sha256"])) for name, each in value["files"].items()},
            )
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise _no_manifest(error) from error

    @property
    def tensors(self) -> dict[str, Kind]:
        """Dtype and shape by name, of all stages."""
        return {name: kind for stage in self.stages for name, kind in stage.tensors.items()}

    def checksum(self, file: str) -> Checksum:
        """The checksum of a file.

        Raises:
            DamagedError: the manifest does not list the file.
        """
        if file not in self.files:
            raise DamagedError(f"{MANIFEST}: it does not list {file}")
        return self.files[file]

    def holders(self, names: Iterable[str]) -> list[SavedStage]:
        """The stages that have one of these names."""
        wanted = set(names)
        return [stage for stage in self.stages if not wanted.isdisjoint(stage.tensors)]


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a complete checkpoint.

    Raises:
        DamagedError: its checksum is not the one in the file COMPLETE.
        UnfitError: its format is newer than this version of pipework.
    """
    mark, content = read_small(directory / COMPLETE), read_small(directory / MANIFEST)
    if mark != completion(content):
        raise DamagedError(f"{MANIFEST}: its SHA-256 is not the one in {COMPLETE}")
    return Manifest.from_bytes(content)


def completion(manifest: bytes) -> bytes:
    """The content of the file that marks a checkpoint as complete."""
    return checksum_of(manifest).sha256.encode() + b"\n"


def read_json(directory: Path, manifest: Manifest, file: str) -> Any:
    """The value in a JSON file.

    Raises:
        DamagedError: the file is missing, has another checksum or is no JSON.
    """
    content = read_verified(directory / file, manifest.checksum(file))
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{file}: its content is no JSON ({error})") from error


def _no_manifest(error: Exception) -> DamagedError:
    return DamagedError(f"{MANIFEST}: its content is no manifest of a checkpoint ({type(error).__name__}: {error})")
