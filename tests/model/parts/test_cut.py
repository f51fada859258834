"""How a model is cut, and what is refused; cut models under autocast, and with deferred batch norms."""

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipework import convert_deferred_batch_norm
from pipework.model.parts.cut import Cuttable
from pipework.model.parts.trace import CannotCut
from tests.model.parts.harness import assert_same, attached, loss_in, micro_batches, plain_step
from tests.model.parts.models import WIDTH, Block, ResNet, batch_of, loss_of
from tests.tiers import sampled

X = torch.randn(2, WIDTH)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.act = nn.ReLU()
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.act(block(x))
        return x


def test_units_without_parameters_stay_with_what_stands_before_them() -> None:
    cuttable = Cuttable(Net(), X, blocks=None)
    assert cuttable.groups == [["blocks.0#0", "act#0"], ["blocks.1#0", "act#1"], ["blocks.2#0", "act#2"]]
    assert list(cuttable.containers) == ["", "blocks"]
    parts = cuttable.sequential([1, 2])
    counts = [sum(1 for _ in part.parameters()) for part in parts]
    assert counts == [4, 10]  # a block has four; the one that is never called is in the last part
    assert {id(each) for each in parts.parameters()} == {id(each) for each in cuttable.model.parameters()}


@pytest.mark.parametrize("balance", [[1, 1], [4], [3, 0], []])
def test_balances_of_another_length_are_refused(balance: list[int]) -> None:
    with pytest.raises(ValueError, match=r"groups of units, and Net has 3: blocks.0#0, blocks.1#0, blocks.2#0"):
        Cuttable(Net(), X, blocks=None).sequential(balance)


def test_too_few_units_and_other_samples() -> None:
    with pytest.raises(CannotCut, match=r"Identity has 0 units at which it could be cut.*blocks= names their classes"):
        Cuttable(nn.Identity(), X, blocks=None)
    with pytest.raises(CannotCut, match=r"Sequential has 1 unit at which it could be cut"):
        Cuttable(nn.Sequential(nn.Linear(WIDTH, WIDTH)), X, blocks=None)
    with pytest.raises(CannotCut, match=r"the sample does not go with the forward of Net: .*a dict has keyword arg"):
        Cuttable(Net(), {"y": X}, blocks=None)
    for sample in ([X], "x"):
        with pytest.raises(CannotCut, match=r"the sample is a (list|str), .*wanted a dict of keyword arguments"):
            Cuttable(Net(), sample, blocks=None)


def test_hooks_and_forwards_on_containers_are_refused() -> None:
    model = Net()
    handle = model.blocks.register_forward_hook(print)
    with pytest.raises(CannotCut, match=r"'blocks' \(ModuleList\) has hooks.*\(blocks.0, blocks.1, blocks.2, ...\)"):
        Cuttable(model, X, blocks=None)
    handle.remove()
    model.forward = model.forward
    with pytest.raises(CannotCut, match="the forward of this Net has been replaced on the module itself"):
        Cuttable(model, X, blocks=None)


def test_a_model_in_evaluation_mode_is_tried_in_training() -> None:
    class Dropping(Net):
        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.steps = getattr(self, "steps", 0) + x.sum()
            return super().forward(x)

    with pytest.raises(CannotCut, match=r"keeps a state in self.steps"):
        Cuttable(Dropping().train(), X, blocks=None)


def autocast(enabled: bool = True) -> Any:
    return torch.autocast("cpu", torch.bfloat16) if enabled else contextlib.nullcontext()


class Mixed(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, labels: Any = None) -> Any:
        with autocast(self.inside):
            x = self.embed(x)
            for block in self.blocks:
                x = block(x)
            x = x @ x.new_ones(WIDTH, WIDTH)  # between units, in the type of autocast
        return loss_of(self.head(x if torch.is_autocast_enabled("cpu") else x.float()), labels)


SETTINGS = [{"checkpoint": "always"}, {"checkpoint": "never"}, {"schedule": "zb-h1"}, {"schedule": "zb-v"}]


@pytest.mark.parametrize(
    ("inside", "at_call", "at_attach", "options"),
    sampled([False, True], [False, True], [False, True], SETTINGS, each=2),
)
def test_it_is_that_of_the_model_itself(inside: bool, at_call: bool, at_attach: bool, options: dict[str, Any]) -> None:
    model, batch = Mixed(inside), batch_of(Mixed)
    plain, pieces = copy.deepcopy(model), micro_batches(batch, 4)
    balance = [1, 2, 2, 1] if options.get("schedule") == "zb-v" else [3, 3]
    with autocast(at_attach):
        attached(model, batch, chunks=4, balance=balance, **options)
    with autocast(at_call):
        loss = loss_in(model(**batch))
        losses = [loss_in(plain(**piece)) * 0.25 for piece in pieces]
    loss.backward()
    for each in losses:
        each.backward()
    total = losses[0].detach()
    for each in losses[1:]:
        total = total + each.detach()
    assert torch.equal(loss.detach(), total)
    assert_same(model, plain)
    model.eval()
    with torch.no_grad(), autocast(at_call):
        expected = torch.cat([plain(piece["x"]) for piece in pieces])
        output = model(batch["x"])
    assert output.dtype == expected.dtype
    assert torch.equal(output, expected)


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_attached(checkpoint: str) -> None:
    model, batch = ResNet(), batch_of(ResNet)
    plain = convert_deferred_batch_norm(copy.deepcopy(model), 4)
    names = list(model.state_dict())
    with pytest.raises(ValueError, match=r"cut already.*convert_deferred_batch_norm\(model, 4\) before the model is"):
        convert_deferred_batch_norm(Cuttable(copy.deepcopy(model), batch, blocks=None).sequential(), 4)
    attached(model, batch, chunks=4, balance=[4, 3], deferred_batch_norm=True, checkpoint=checkpoint)
    assert list(model.state_dict()) == names
    for _ in range(2):
        loss, expected = loss_in(model(**batch)), plain_step(plain, batch, 4)
        loss.backward()
        assert torch.equal(loss.detach(), expected)
        assert_same(model, plain)
