"""The table of contents of a checkpoint: the tensors of each stage, and the checksum of every file."""

from __future__ import annotations

import json
import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch

import pipework
from pipework.saving.files import MANIFEST, Checksum, DamagedError, UnfitError, parsing, read_small, verify_file
from pipework.saving.stages import plain_name
from pipework.saving.tensor_files import Kind, Sharded, open_stage, shards_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor

FORMAT: Final = "pipework checkpoint"
VERSION: Final = 2
_WHOLE: Final = 1  # the version of a checkpoint in which no tensor is in parts

What = Literal["model", "optimizer"]
_SHARDED: Final[Mapping[What, str]] = MappingProxyType({"model": "sharded", "optimizer": "sharded_state"})
"""The key in a manifest of the tensors that are in parts."""


def stage_file(what: What, stage: int, shard: int = 0) -> str:
    """The file of a stage's parameters and buffers, or of the tensors in its optimizer's state, or of one shard.

    Example:
        >>> stage_file("model", 3), stage_file("optimizer", 3, 1)
        ('model-stage-00003.safetensors', 'optimizer-stage-00003-shard-00001.safetensors')
    """
    return f"{what}-stage-{stage:05d}{f'-shard-{shard:05d}' if shard else ''}.safetensors"


def optimizer_values(stage: int) -> str:
    """The file of all else in the optimizer's state of a stage."""
    return f"optimizer-stage-{stage:05d}.json"


def training_files(rank: int) -> tuple[str, str]:
    """The files of the training state of a rank: for tensors and for JSON.

    Example:
        >>> training_files(0), training_files(2)[1]
        (('training.safetensors', 'training.json'), 'training-rank-00002.json')
    """
    name = f"training-rank-{rank:05d}" if rank else "training"
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
        sharded: the tensors that are in parts, by their name in the files: those of the model and those of the
            optimizer's state.
    """

    stage: int
    rank: int
    tensors: Mapping[str, Kind]
    aliases: Mapping[str, str]
    optimizer: bool
    sharded: Mapping[What, Mapping[str, Sharded]] = field(default_factory=lambda: {what: {} for what in _SHARDED})

    def files(self, what: What) -> dict[int, str]:
        """The files of its tensors, by the number of the shard."""
        return {shard: stage_file(what, self.stage, shard) for shard in shards_of(self.sharded[what])}

    def with_shards(self, other: SavedStage) -> SavedStage:
        """With the parts that another process has written."""
        sharded = {what: dict(mine) for what, mine in self.sharded.items()}
        for what, theirs in other.sharded.items():
            for name, each in theirs.items():
                parts = sharded[what][name].parts if name in sharded[what] else ()
                sharded[what][name] = Sharded(each.shape, (*parts, *each.parts))
        return replace(self, sharded=sharded)

    def to_json(self) -> dict[str, Any]:
        """As a JSON value."""
        value = {key: value for key, value in vars(self).items() if key != "sharded"}
        for what, part in self.sharded.items():
            if part:
                value[_SHARDED[what]] = {name: vars(each) for name, each in part.items()}
        return value

    @classmethod
    def from_json(cls, value: Any) -> SavedStage:
        """From a JSON value. Names that `torch.compile` made become plain names."""
        kinds = {name: Kind(str(dtype), tuple(map(int, shape))) for name, (dtype, shape) in value["tensors"].items()}
        in_file = {plain_name(name): str(value["aliases"].get(name, name)) for name in kinds}
        return cls(
            int(value["stage"]),
            int(value["rank"]),
            {plain_name(name): kind for name, kind in kinds.items()},
            {name: there for name, there in in_file.items() if name != there},
            bool(value["optimizer"]),
            {
                what: {name: Sharded.from_json(each) for name, each in value.get(key, {}).items()}
                for what, key in _SHARDED.items()
            },
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
            "version": VERSION if any(any(stage.sharded.values()) for stage in self.stages) else _WHOLE,
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
        with parsing(MANIFEST):
            value = json.loads(content)
            version, writer = value["version"], value["libraries"]["pipework"]
            if value["format"] != FORMAT:
                raise ValueError(f"its format is {value['format']!r}")
            if version > VERSION:
                raise UnfitError(
                    f"the checkpoint has format {version}, written by pipework {writer}, and pipework "
                    f"{pipework.__version__} knows formats up to {VERSION}: install a newer pipework"
                )
            ranks, replicas = int(value["ranks"]), int(value.get("replicas", 1))
            if not 1 <= replicas <= ranks or ranks % replicas:
                raise ValueError(f"{ranks} ranks cannot be {replicas} replicas")
            stages = tuple(map(SavedStage.from_json, value["stages"]))
            files = {name: Checksum(int(each["bytes"]), str(each["sha256"])) for name, each in value["files"].items()}
            return cls(int(value["step"]), ranks, replicas, stages, files)

    @property
    def tensors(self) -> dict[str, Kind]:
        """Dtype and shape by name, of all stages."""
        return {name: kind for stage in self.stages for name, kind in stage.tensors.items()}

    def verify(self, directory: Path, file: str) -> Path:
        """The path of a file that has its checksum.

        Raises:
            DamagedError: the file is missing or has another checksum, or the manifest does not list it.
        """
        if file not in self.files:
            raise DamagedError(f"{MANIFEST}: it does not list {file}")
        verify_file(directory / file, self.files[file])
        return directory / file

    def open(self, directory: Path, stage: SavedStage, what: What) -> AbstractContextManager[Callable[[str], Tensor]]:
        """Verifies and opens the files of a stage; see `open_stage`.

        Raises:
            DamagedError: a file is missing or has another checksum, or the manifest does not list it.
        """
        paths = {shard: self.verify(directory, file) for shard, file in stage.files(what).items()}
        return open_stage(paths, stage.sharded[what])

    def read_json(self, directory: Path, file: str) -> Any:
        """The value in a JSON file.

        Raises:
            DamagedError: the file is missing, has another checksum or is no JSON.
        """
        content = read_small(self.verify(directory, file))
        with parsing(file):
            return json.loads(content)
