"""Layers that torch.compile wraps have the names that they would have without it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from pipework import Pipe, load_checkpoint, save_checkpoint
from pipework.saving import convert, manifest, stages
from tests.saving.harness import Cut, assert_same, make_pipe, model, snapshot, stir

# torch.compile imports parts of PyTorch that warn of others.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def compiled(cut: Cut = Cut(2, "gpipe")) -> Pipe:  # noqa: B008
    """Never run, so that there need not be a compiler: of two layers, and of a layer in a layer."""
    layers = model()
    layers[0] = torch.compile(layers[0], backend="eager")
    layers[4] = nn.Sequential(torch.compile(nn.Sequential(layers[4]), backend="eager"))
    layers[7] = torch.compile(layers[7], backend="eager")
    assert "0._orig_mod.weight" in layers.state_dict()
    assert "4.0._orig_mod.0.weight" in layers.state_dict()
    return make_pipe(cut, layers)


def plain(cut: Cut = Cut(3, "gpipe")) -> Pipe:  # noqa: B008
    layers = model()
    layers[4] = nn.Sequential(nn.Sequential(layers[4]))
    return make_pipe(cut, layers)


def named(pipe: Pipe) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in snapshot(pipe).items()}


def moments(pipe: Pipe, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    named = {name.replace("_orig_mod.", ""): each for name, each in pipe.named_parameters()}
    return {name: optimizer.state[each]["exp_avg"].clone() for name, each in named.items()}


@pytest.mark.parametrize(("before", "after"), [(compiled, plain), (plain, compiled)])
def test_from_compiled_layers_into_plain_ones_and_back(tmp_path, before, after):
    pipe = before()
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.5)
    stir(pipe, optimizer)
    path = save_checkpoint(tmp_path, pipe, optimizer, step=1)
    other = after(Cut(1, "gpipe"))
    restored = torch.optim.Adam(other.parameters(), lr=0.1)
    assert load_checkpoint(tmp_path, other, restored).step == 1
    assert_same(named(other), named(pipe))
    assert_same(moments(other, restored), moments(pipe, optimizer))
    assert restored.param_groups[0]["lr"] == 0.5
    assert "_orig_mod" not in "".join(file.read_text("latin-1") for file in path.iterdir())


def tied(pipe: Pipe) -> Pipe:
    """With one bias in three layers."""
    linear = [module for module in pipe.modules() if isinstance(module, nn.Linear)]
    pipe[1].bias = linear[1].bias = linear[0].bias
    return pipe


def test_checkpoints_with_the_names_of_compiled_layers_are_read(tmp_path, monkeypatch):
    pipe = tied(compiled())
    optimizer = torch.optim.Adam(pipe.parameters(), lr=0.5)
    stir(pipe, optimizer)
    with monkeypatch.context() as patch:
        for module in (stages, manifest):
            patch.setattr(module, "plain_name", str)
        path = save_checkpoint(tmp_path, pipe, optimizer, step=1)
    (first, second) = json.loads((path / "manifest.json").read_text())["stages"]
    assert "7._orig_mod.weight" in second["tensors"]
    assert first["aliases"] == dict.fromkeys(["1.bias", "4.0._orig_mod.0.bias"], "0._orig_mod.bias")
    other = tied(plain(Cut(1, "gpipe")))
    restored = torch.optim.Adam(other.parameters(), lr=0.1)
    load_checkpoint(tmp_path, other, restored)
    assert_same(named(other), named(pipe))
    assert_same(moments(other, restored), moments(pipe, optimizer))
    convert(path, tmp_path / "x.safetensors")
    assert load_file(tmp_path / "x.safetensors").keys() == named(pipe).keys()


def test_names_that_fall_together_are_refused(tmp_path):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self._orig_mod = nn.PReLU()

    pipe = Pipe(nn.Sequential(Both()), balance=[1])
    with pytest.raises(ValueError, match=r"0\._orig_mod\.weight would be saved as 0\.weight, which is the name of ano"):
        save_checkpoint(tmp_path, pipe, step=1)
    assert not list(tmp_path.iterdir())
