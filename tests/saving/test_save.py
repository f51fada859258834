import sys

import pytest
import torch
from torch import nn

from pipework import Pipe, load_checkpoint, save_checkpoint
from tests.saving.harness import make_pipe


def test_a_step_again_replaces_it(tmp_path):
    pipe = make_pipe()
    save_checkpoint(tmp_path, pipe, step=1, data_position="first")
    save_checkpoint(tmp_path, pipe, step=1, data_position="second")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001"]
    assert load_checkpoint(tmp_path, pipe).data_position == "second"


def test_keep(tmp_path, caplog):
    pipe = make_pipe()
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, pipe, step=step)
    (tmp_path / "step-00000003" / "COMPLETE").unlink()
    (tmp_path / "notes.txt").touch()
    (tmp_path / "step-of-my-own").mkdir()
    save_checkpoint(tmp_path, pipe, step=9)
    left = lambda: sorted(each.name for each in tmp_path.iterdir())  # noqa: E731
    save_checkpoint(tmp_path, pipe, step=4, keep=2)
    assert left() == ["notes.txt", *(f"step-0000000{n}" for n in (2, 4, 9)), "step-of-my-own"]
    save_checkpoint(tmp_path, pipe, step=5, keep=1)
    assert left() == ["notes.txt", *(f"step-0000000{n}" for n in (5, 9)), "step-of-my-own"]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"step": -1}, ValueError, "step must be an integer of at least 0, got -1"),
        ({"step": True}, ValueError, "step must be an integer of at least 0, got True"),
        ({"step": 1.0}, ValueError, "step must be an integer of at least 0, got 1.0"),
        ({"step": 1, "keep": 0}, ValueError, "keep must be an integer of at least 1, got 0"),
        ({"step": 1, "data_position": {"at": object()}}, TypeError, "data_position/at is a builtins.object, which a"),
        ({"step": 1, "data_position": torch.ones(2).to_sparse()}, TypeError, "its layout is torch.sparse_coo"),
        ({"step": 1, "data_position": torch.ones(2, device="meta")}, TypeError, "lies on the meta device"),
        ({"step": 1, "data_position": torch.ones(2, dtype=torch.complex128)}, TypeError, "dtype is torch.complex128"),
        ({"step": 1, "scheduler": 5}, TypeError, "scheduler must have state_dict.. and load_state_dict.., got a int"),
        ({"step": 1, "optimizer": 5}, TypeError, "wanted a torch.optim.Optimizer, got a int"),
    ],
)
def test_what_is_refused_before_anything_is_written(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        save_checkpoint(tmp_path / "run", make_pipe(), **options)
    assert not (tmp_path / "run").exists()


def test_pipes_that_are_refused(tmp_path):
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {}

    pipe = make_pipe()
    with pytest.raises(TypeError, match=r"wanted a pipework.Pipe, got a Wrapped \(give its .module\)"):
        save_checkpoint(tmp_path, type("Wrapped", (), {"module": pipe})(), step=1)
    with pytest.raises(TypeError, match=r"wanted a pipework.Pipe, got a Sequential"):
        load_checkpoint(tmp_path, nn.Sequential())
    with pytest.raises(TypeError, match=r"layer '0' \(Extra\) has extra state"):
        save_checkpoint(tmp_path, Pipe(nn.Sequential(Extra(1, 1)), balance=[1]), step=1)
    stranger = torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match=r"parameters that are not the pipe's; .*: \(3,\) in group 0\."):
        save_checkpoint(tmp_path, pipe, stranger, step=1)
    odd = torch.optim.SGD(pipe.parameters())
    odd.state["global"] = {"count": 1}
    with pytest.raises(TypeError, match="state that belongs to no parameter, under 'global'"):
        save_checkpoint(tmp_path, pipe, odd, step=1)
    assert not list(tmp_path.iterdir())


def test_a_pipe_without_layers(tmp_path):
    pipe = Pipe(nn.Sequential())
    save_checkpoint(tmp_path, pipe, step=1)
    assert load_checkpoint(tmp_path, pipe).step == 1


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    for call in (
        lambda: save_checkpoint(tmp_path, make_pipe(), step=1),
        lambda: load_checkpoint(tmp_path, make_pipe()),
    ):
        with pytest.raises(ImportError, match=r"pip install '\.\[checkpoint\]'"):
            call()
