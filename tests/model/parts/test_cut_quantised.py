"""Weights in storage classes of their own: bytes with a scale, as bitsandbytes has them, and wrappers, as torchao's."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from pipework import load_checkpoint, save_checkpoint, to_sequential
from tests.model.parts.harness import assert_exact, attached, loss_in, plain_step
from tests.model.parts.models import WIDTH, batch_of
from tests.model.parts.quantised import LINEARS, EightLinear, PackedLinear, Quantised

KINDS = pytest.mark.parametrize("kind", LINEARS.values(), ids=LINEARS.keys())


@KINDS
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "interleaved-1f1b"])
def test_a_step_is_that_of_the_model_itself(kind: type[nn.Linear], schedule: str) -> None:
    balance = [1, 2, 2, 1] if schedule == "interleaved-1f1b" else [3, 3]
    pipe = assert_exact(Quantised(kind), batch_of(Quantised), chunks=4, schedule=schedule, balance=balance)
    assert {name for name, each in pipe.named_parameters() if each.requires_grad} == {
        name for name, _ in pipe.named_parameters() if ".up." in name or ".down." in name
    }


@KINDS
def test_classes_and_their_attributes_survive(kind: type[nn.Linear]) -> None:
    model, batch = Quantised(kind), batch_of(Quantised)
    before, names = [type(each) for each in model.parameters()], list(model.state_dict())
    kept = [(each, vars(each).get("quant_state")) for each in model.parameters()]
    attached(model, batch, balance=[3, 3])  # compares with the model
    loss_in(model(**batch)).backward()
    assert [type(each) for each in model.parameters()] == before
    for parameter, (own, state) in zip(model.parameters(), kept, strict=True):
        assert parameter is own
        assert vars(parameter).get("quant_state") is state
    assert list(model.state_dict()) == names
    other = Quantised(kind)
    plain = copy.deepcopy(other)
    model.load_state_dict(other.state_dict())
    assert torch.equal(loss_in(model(**batch)).detach(), plain_step(plain, batch, 2))


class Repacks(PackedLinear):
    """In evaluation it stores its bytes anew and rounds their scales, as bitsandbytes does on some CPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not x.requires_grad:
            self.weight.data, state = self.weight.data.clone(), self.weight.quant_state
            state.scales = state.scales.bfloat16().float()
        return super().forward(x)


def test_attach_changes_no_weights_that_are_repacked_in_evaluation() -> None:
    model, batch = Quantised(Repacks), batch_of(Quantised)
    plain = copy.deepcopy(model)
    attached(model, batch, balance=[3, 3])
    assert torch.equal(loss_in(model(**batch)).detach(), plain_step(plain, batch, 2))


def test_a_checkpoint_has_the_bytes_and_their_scales(tmp_path: Path) -> None:
    batch = batch_of(Quantised)
    models = [Quantised(PackedLinear) for _ in range(2)]
    pipes = [attached(model, batch, balance=[3, 3]) for model in models]
    optimizers = [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]) for model in models]
    losses = []
    for step in range(2):
        optimizers[0].zero_grad()
        loss = loss_in(models[0](**batch))
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
        if not step:
            save_checkpoint(tmp_path, pipes[0], optimizers[0], step=1)
    load_checkpoint(tmp_path, pipes[1], optimizers[1])
    assert [type(each) for each in models[1].parameters()] == [type(each) for each in models[0].parameters()]
    assert loss_in(models[1](**batch)).item() == losses[1]


def test_a_wrapper_is_in_no_checkpoint_and_weights_without_values_are_refused(tmp_path: Path) -> None:
    pipe = attached(Quantised(EightLinear), batch_of(Quantised), balance=[3, 3])
    with pytest.raises(TypeError, match=r"inner\.base_layer\.weight' cannot be saved .*: it is a Eight, whose data"):
        save_checkpoint(tmp_path, pipe, step=1)
    with torch.device("meta"):
        model = Quantised(PackedLinear)
    message = r"blocks\.0\.inner\.base_layer\.weight is a Packed on the meta device.*load such weights before"
    with pytest.raises(ValueError, match=message):
        to_sequential(model, {"x": torch.randn(2, WIDTH)})
