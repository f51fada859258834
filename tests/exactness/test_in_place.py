"""Layers that change their input in place, cut off from what made it: they work, or fail, as without a cut."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import WAYS, bitwise, distance

CHUNKS = 4


class Does(nn.Module):
    def __init__(self, act: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Any:
        return self.act(x)


def changes_a_part(x: Tensor) -> Tensor:
    x[:, :1].mul_(2)
    return x


def turned() -> nn.Module:
    return Does(lambda x: x.mT)


# Between the input, or a layer, and a linear layer.
LAYERS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "none": lambda: [nn.ReLU(inplace=True), nn.Flatten()],
    "identity": lambda: [nn.Identity(), nn.ReLU(inplace=True), nn.Flatten()],
    "flatten": lambda: [nn.Flatten(), nn.ReLU(inplace=True)],
    "flatten twice": lambda: [nn.Flatten(), nn.Flatten(), nn.Hardtanh(inplace=True)],
    "unflatten": lambda: [nn.Unflatten(1, (2, -1)), nn.ReLU(inplace=True), nn.Flatten()],
    "transposed": lambda: [turned(), nn.ReLU(inplace=True), turned(), nn.Flatten()],
    "part": lambda: [nn.Identity(), Does(changes_a_part), nn.Flatten()],
    "dropout": lambda: [nn.Flatten(), nn.Dropout(0.5, inplace=True)],
}
INPUTS = ("data", "leaf", "computed")


def inputs(kind: str, rows: Tensor) -> Tensor:
    rows = rows.clone()
    return rows if kind == "data" else rows.requires_grad_() if kind == "leaf" else rows.requires_grad_() * 1


def balances(layers: int) -> list[list[int]]:
    return [[1] * layers, *([cut, layers - cut] for cut in range(1, min(layers, 4)))]


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("way", ["outside", "gpipe", "1f1b", "zb-h1"], indirect=True)
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("first", [False, True], ids=["after a layer", "first"])
@pytest.mark.parametrize("name", LAYERS)
def test_it_works_wherever_it_does_without_a_cut(name: str, first: bool, kind: str, checkpoint: str, way: Any) -> None:
    module = nn.Sequential(*([] if first else [nn.Linear(6, 6)]), *LAYERS[name](), nn.Linear(24, 3))
    batch, target = torch.randn(8, 4, 6), torch.randn(8)
    refused = first and kind == "leaf"
    for balance in balances(len(module)):
        plain = copy.deepcopy(module)
        pipe = way.pipe(plain, CHUNKS, checkpoint, balance=balance)
        for step in range(2):
            x = inputs(kind, batch)
            torch.manual_seed(step)
            if refused:
                with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
                    way.loss(pipe, x, target).backward()
                bitwise(x.detach(), batch)
                continue
            loss = way.loss(pipe, x, target)
            loss.backward()
            if "dropout" in name:
                continue
            plain.zero_grad()
            for rows, numbers in zip(batch.split(2), target.split(2), strict=True):
                (distance(plain(inputs(kind, rows)), numbers) / CHUNKS).backward()
            for actual, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(actual.grad, expected.grad)
            pipe.zero_grad()


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("checkpoint", ["never", "except_last"])
def test_what_the_layer_before_has_saved_must_not_be_changed(checkpoint: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid(), nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(4, 1))
    x, target = torch.randn(8, 4), torch.randn(8)
    message = r"modified by an inplace operation: \[torch.FloatTensor \[\d, 4\]\], which is output 0 of Sigmoid"
    with pytest.raises(RuntimeError, match=message):
        distance(module(x), target).backward()
    pipe = WAYS["1f1b"].pipe(module, CHUNKS, checkpoint, balance=[2, 1, 2])
    with pytest.raises(RuntimeError, match=message):
        pipe(x, target=target)


def zeroes_large(x: Tensor) -> Tensor:
    large = x.detach() > 1
    if large.any():
        x[large] = 0
    return x


@pytest.mark.one_process("a failure between processes ends the pipe: tests/distributed/together")
@pytest.mark.parametrize("way", ["outside", "1f1b", "interleaved-1f1b"], indirect=True)
@pytest.mark.parametrize("checkpoint", ["except_last", "always"])
def test_a_recomputed_stage_changes_inputs_from_the_first_micro_batch_on(checkpoint: str, way: Any) -> None:
    module = nn.Sequential(nn.Linear(4, 4), Does(zeroes_large), nn.Linear(4, 4), nn.Linear(4, 1))
    nn.init.zeros_(module[0].bias)
    nn.init.eye_(module[0].weight)
    pipe = way.pipe(module, CHUNKS, checkpoint, balance=[1, 1, 1, 1])
    with pytest.raises(RuntimeError, match="which it did not do for the first micro-batch"):
        way.loss(pipe, torch.arange(8.0)[:, None].expand(8, 4) / 2, torch.randn(8))


@pytest.mark.one_process("looks at the batch of one process")
@pytest.mark.parametrize("way", ["outside", "1f1b"], indirect=True)
def test_the_callers_graph_learns_that_the_batch_was_changed(way: Any) -> None:
    pipe = way.pipe(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 1)), 3, "never", balance=[1, 1])
    x = torch.randn(6, 4, requires_grad=True).sigmoid()
    way.loss(pipe, x, torch.randn(6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
