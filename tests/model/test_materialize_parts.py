"""Parts of a model that was built on the meta device: each module is filled as its name says, wherever the cut is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import Pipe, attach


class Block(nn.Module):
    """Fills what it has itself; no state dict has its shift."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.own = Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.linear(x))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(4))
        self.register_buffer("shift", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.factor)
        with torch.no_grad():
            self.shift.copy_(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + self.shift


class Net(Own):
    """Has tensors beside its units. Two of its blocks, perhaps on two stages, share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].linear.weight = self.blocks[0].linear.weight

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        for block in self.blocks:
            x = x + block(x) * self.factor + self.shift
        return x if labels is None else nn.functional.mse_loss(x, labels)


class Unfilled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].other = nn.Parameter(torch.empty(4))


class BesideUnfilled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.empty(4))

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return super().forward(x * self.other, labels)


BATCH = {"x": torch.ones(6, 4), "labels": torch.zeros(6, 4)}


def on_meta(kind: Callable[[], Any], *balance: int) -> tuple[Any, Pipe]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = kind()
    return model, attach(model, BATCH, chunks=2, balance=balance, devices=["cpu"] * len(balance))


def test_values_do_not_depend_on_the_cut_and_are_trained() -> None:
    states, losses = [], []
    for balance in ((4,), (2, 2), (1, 2, 1)):
        model, pipe = on_meta(Net, *balance)
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(**BATCH)
        loss.backward()
        states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        losses.append(loss.item())
        optimizer.step()
        shifts = [*(block.own.shift for block in model.blocks), *(part.get_submodule("model").shift for part in pipe)]
        assert all(torch.equal(shift, torch.arange(4.0)) for shift in shifts)
        assert model.shift is pipe[0].get_submodule("model").shift
        assert model.blocks[3].linear.weight is model.blocks[0].linear.weight
        assert not any(tensor.is_meta for tensor in pipe.state_dict().values())
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)
    for state in states[1:]:
        assert all(torch.equal(state[name], tensor) for name, tensor in states[0].items())
    weights = [states[0][f"blocks.{number}.linear.weight"] for number in range(3)]
    assert not torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])


CASES = [
    (Unfilled, r"model\.blocks\.2\.other: parameter of Block", lambda model: model.blocks[2].other),
    (BesideUnfilled, r"model\.other: parameter of BesideUnfilled", lambda model: model.other),
]


@pytest.mark.parametrize(("kind", "name", "other"), CASES, ids=["in a unit", "beside units"])
def test_what_nothing_fills_is_named(kind: Callable[[], Any], name: str, other: Callable[[Any], Tensor]) -> None:
    model, pipe = on_meta(kind, 2, 2)
    with pytest.raises(RuntimeError, match=f"{name}"):
        model(**BATCH)
    with torch.device("cpu"):
        pipe.load_state_dict(kind().state_dict())
    assert other(model).device.type == "cpu"
