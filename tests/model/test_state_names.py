"""Names in the state dict of a pipe of a model's parts are the model's own, wherever it was cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from pipework import Pipe, attach, load_checkpoint, save_checkpoint, to_sequential
from pipework.saving import convert


class Net(nn.Module):
    """Has a buffer of its own, of which each part has a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.randn(4))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(4))
        self.blocks[3][0].weight = self.blocks[1][0].weight  # used by two stages

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = x + block(x) + self.shift
        return x if labels is None else (nn.functional.mse_loss(x, labels), x)


BATCH = {"x": torch.ones(6, 4), "labels": torch.zeros(6, 4)}


def pipe_of(net: nn.Module, *balance: int) -> Pipe:
    return attach(net, BATCH, chunks=2, balance=balance, devices=["cpu"] * len(balance))


def stepped(net: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.randn(8, 4), torch.randn(8, 4))[0].backward()
    optimizer.step()
    return optimizer


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("balance", [(4,), (2, 2), (1, 2, 1)])
def test_names_are_those_of_the_model(balance: tuple[int, ...]) -> None:
    net = Net()
    pipe = pipe_of(net, *balance)
    assert_same(pipe.state_dict(), net.state_dict())
    for kind in ("named_parameters", "named_buffers"):
        wanted = {name: id(each) for name, each in getattr(net, kind)(remove_duplicate=False)}
        assert {name: id(each) for name, each in getattr(pipe, kind)(remove_duplicate=False) if name != "shift"} == {
            name: which for name, which in wanted.items() if name != "shift"
        }
    assert {key.partition(".")[0] for key in pipe.state_dict(prefix="a.")} == {"a"}


def test_the_state_of_the_model_is_loaded_whole() -> None:
    source, pipe = Net(), pipe_of(Net(), 2, 2)
    pipe.load_state_dict(source.state_dict())
    assert_same(pipe.state_dict(), source.state_dict())
    shifts = [part.get_submodule("model").shift for part in pipe]
    assert all(torch.equal(shift, source.shift) for shift in shifts)
    state = source.state_dict()
    state["other"] = state.pop("blocks.0.0.bias")
    with pytest.raises(RuntimeError, match=r"it lacks \['blocks\.0\.0\.bias'\], and \['other'\] are none"):
        pipe.load_state_dict(state)
    found = pipe.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["blocks.0.0.bias"], ["other"])


def test_a_checkpoint_of_one_cut_is_loaded_into_another(tmp_path: Path) -> None:
    net = Net()
    pipe = pipe_of(net, 1, 3)
    optimizer = stepped(net)
    path = save_checkpoint(tmp_path, pipe, optimizer, step=1)
    for balance in ((4,), (2, 1, 1)):
        other = Net()
        again = pipe_of(other, *balance)
        load_checkpoint(tmp_path, again, remembering := torch.optim.AdamW(other.parameters()))
        assert_same(again.state_dict(), pipe.state_dict())
        for before, after in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(remembering.state[after]["exp_avg"], optimizer.state[before]["exp_avg"])
    layers = Pipe(to_sequential(Net(), BATCH), devices=["cpu"])  # several parts, each with a copy of the buffer
    load_checkpoint(tmp_path, layers)
    assert all(torch.equal(part.get_submodule("model").shift, net.shift) for part in layers)
    convert(path, tmp_path / "model.safetensors")
    plain = Net()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_same(plain.state_dict(), pipe.state_dict())


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of what torch.compile imports
def test_a_compiled_part_has_the_same_names() -> None:
    layers = to_sequential(Net(), BATCH, balance=[2, 2])
    layers[1] = torch.compile(layers[1], backend="eager")
    assert Pipe(layers, devices=["cpu"]).state_dict().keys() == Net().state_dict().keys()
