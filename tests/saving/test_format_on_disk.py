"""The format on disk: what version 1 wrote is still read, and what is written now is the same.

`format_1.json` has values as version 1 encoded them, and the JSON files of a checkpoint that it wrote.
"""

import enum
import json
import math
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pipework.saving.manifest import Manifest
from pipework.saving.tensor_files import NamedTensors
from pipework.values.json_codec import JsonCodec

FIXTURE = json.loads(Path(__file__).with_name("format_1.json").read_text())


class Phase(enum.IntEnum):
    WARM = 1


class Name(enum.StrEnum):
    COSINE = "cosine"


VALUES: dict[str, Any] = {
    "constants": [None, True, False],
    "integers": [0, -1, 2**63, -(2**63) - 1, 10**400],
    "floats": [0.1, -0.0, 5e-324, 1.7976931348623157e308, math.inf, -math.inf, math.nan],
    "text": ["", "text", "ü\0", "\ud800", "$"],
    "numpy": [np.float64(0.1), np.float32(0.5), np.int64(3)],
    "enums": [Phase.WARM, Name.COSINE],
    "tuples": (1, (), [2, (3.5, None)], torch.Size([2, 3])),
    "sets": [{1, 2}, frozenset("ab"), set()],
    "dict": {"a": 1, "b": {"c": (2,)}, "": []},
    "keys": {7: "int", None: "none", True: "bool", 2.5: "float", (1, ("x", 2)): "tuple", math.inf: "inf"},
    "dollar": {"$": "tuple", "items": [1]},
    "ordered": OrderedDict(b=1, a=[2]),
    "counter": Counter({3: 2, "x": 1}),
    "tensors": {"a/b": torch.ones(2), "a": {"b": torch.zeros(2)}, 3: (torch.tensor(3),)},
}


class Stored(dict[str, Tensor]):
    """Tensors by name; one that a fixture names is made when it is asked for."""

    def __missing__(self, name: str) -> Tensor:
        self[name] = torch.tensor(len(self))
        return self[name]


def packed_again(form: Any, where: str) -> Any:
    """What was read, written again."""
    stored = Stored()
    written = NamedTensors()
    again = JsonCodec(put=written.put).encode(JsonCodec(get=stored.__getitem__).decode(form), where)
    assert {name: id(tensor) for name, tensor in written.items()} == {name: id(t) for name, t in stored.items()}
    return again


def test_values_are_written_as_they_were() -> None:
    tensors = NamedTensors()
    for name, value in VALUES.items():
        form = JsonCodec(put=tensors.put).encode(value, name)
        assert json.dumps(form, allow_nan=False) == json.dumps(FIXTURE["values"][name])
    assert list(tensors) == FIXTURE["tensors"]


@pytest.mark.parametrize("name", VALUES)
def test_values_are_read_as_they_were(name: str) -> None:
    read = JsonCodec(get=lambda name: torch.tensor(0)).decode(FIXTURE["values"][name])
    plain = {
        "numpy": [0.1, 0.5, 3],
        "enums": [1, "cosine"],
        "tuples": (1, (), [2, (3.5, None)], (2, 3)),
        "tensors": {"a/b": torch.tensor(0), "a": {"b": torch.tensor(0)}, 3: (torch.tensor(0),)},
    }
    expected = plain.get(name, VALUES[name])
    assert repr(read) == repr(expected) if name != "sets" else read == expected


@pytest.mark.parametrize("file", ["optimizer-stage-00000.json", "optimizer-stage-00001.json", "training.json"])
def test_states_of_a_real_checkpoint_are_read_and_written_again(file: str) -> None:
    content = FIXTURE[file]
    forms = content
    if file != "training.json":
        assert content["optimizer"] == "AdamW"
        forms = {f"group {n}": group["options"] for n, group in enumerate(content["groups"])} | content["state"]
    for where, form in forms.items():
        assert json.dumps(packed_again(form, where)) == json.dumps(form)


def test_the_manifest_of_a_real_checkpoint_is_read_and_written_again() -> None:
    text = FIXTURE["manifest.json"]
    manifest = Manifest.from_bytes(text.encode())
    assert (manifest.step, manifest.ranks, manifest.replicas, len(manifest.stages)) == (12, 1, 1, 2)
    again = json.loads(manifest.to_bytes())
    assert {**again, "libraries": None} == {**json.loads(text), "libraries": None}
