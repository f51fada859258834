"""The two commands are plain values; what carries them out is tested in `test_decorator.py`."""

import dataclasses

import pytest
import torch

from pipework.skip import pop, stash


def test_a_stash_has_a_name_and_the_tensor_itself() -> None:
    tensor = torch.ones(2)
    command = stash("a", tensor)
    assert command.name == "a"
    assert command.tensor is tensor


@pytest.mark.parametrize("command", [stash("a", None), pop("a")])
def test_they_cannot_be_changed(command: object) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        command.name = "b"


def test_each_command_equals_itself_alone() -> None:
    assert pop("a") != pop("a")  # comparing stashes would compare tensors element by element
