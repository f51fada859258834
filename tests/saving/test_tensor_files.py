import json
import struct

import pytest
import torch
from safetensors.torch import load_file

from pipework.saving.files import DamagedError
from pipework.saving.tensor_files import _CODES, Kind, open_tensors, write_tensors
from tests.saving.harness import checksum_of


def tensors():
    made = {f"torch.{name}": torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name)) for name in _CODES}
    made |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5), 'quo"te é': torch.ones(1)}
    made["turned"] = torch.randn(3, 4).t()
    return made | {"view": made["torch.float32"][1:, ::2], "again": made["torch.float32"]}


def test_the_library_reads_what_was_written_and_elements_are_aligned(tmp_path):
    file = tmp_path / "x.safetensors"
    made = tensors()
    checksum = write_tensors(file, made)
    assert checksum == checksum_of(file.read_bytes())
    read = load_file(file)
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert Kind.of(read[name]) == Kind.of(tensor)
        flat = [each.contiguous().reshape(-1).view(torch.uint8) for each in (read[name], tensor)]
        assert torch.equal(*flat), name
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    header = json.loads(file.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert [name for name in made if header[name]["data_offsets"][0] % made[name].itemsize] == []


def test_no_safetensors_file(tmp_path):
    file = tmp_path / "x.safetensors"
    for content in (b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0{}x", struct.pack("<Q", 2**40) + b"{"):
        file.write_bytes(content)
        with pytest.raises(DamagedError, match=r"x.safetensors: it cannot be read"), open_tensors(file):
            pass
