import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from pipework.runtime.stage.loss import InnerLoss, LossRun, mean_weights, total
from pipework.values.nested import flatten


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).mean()


def test_weights_are_shares() -> None:
    assert mean_weights([2, 2, 1]) == (2 / 5, 2 / 5, 1 / 5)
    assert mean_weights([0, 3]) == (0.0, 1.0)
    assert all(math.isnan(weight) for weight in mean_weights([0, 0.0]))


def test_a_part_is_the_loss_times_its_share() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    inner = InnerLoss(mean, weights=(0.25, 0.75))
    assert inner.part(value, 1).item() == 2.25
    inner.part(value, 0).backward()
    assert value.grad == 0.25
    assert InnerLoss(mean, weights=None).part(value, 5) is value


def test_what_weighs_nothing_is_zero_even_if_it_is_nan() -> None:
    value = torch.tensor(math.nan, dtype=torch.float64, requires_grad=True)
    part = InnerLoss(mean, weights=(0.0, 1.0)).part(value, 0)
    assert part == 0
    assert part.dtype == torch.float64
    assert not part.requires_grad
    assert InnerLoss(mean, weights=(math.nan,)).part(torch.tensor(1.0), 0).isnan()
    assert InnerLoss(mean, (0.5, 0.0, 0.5), micro_batches=3).counted == {0, 2}
    assert InnerLoss(mean, micro_batches=2).counted == {0, 1}


class Criterion(nn.Module):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return output


@pytest.mark.parametrize(
    ("function", "source"),
    [
        (mean, r"loss_fn \(mean\)"),
        (nn.functional.cross_entropy, r"loss_fn \(cross_entropy\)"),
        (Criterion(), r"loss_fn \(Criterion\)"),
        (lambda output, target: output, r"loss_fn \(<lambda>\)"),
        (None, "the last layer"),
    ],
)
def test_another_result_is_refused_by_name(function: object, source: str) -> None:
    inner = InnerLoss(function, weights=(1.0,))
    for value, kind in ((3.0, "float"), (None, "NoneType"), ((torch.tensor(1.0),), "tuple")):
        with pytest.raises(TypeError, match=f"^{source} returned {kind}, wanted the loss as a 0-dimensional tensor"):
            inner.part(value, 0)
    for shape in ((1,), (2, 3)):
        with pytest.raises(ValueError, match=rf"^{source} returned a tensor of shape .*0-dimensional loss: reduce it"):
            inner.part(torch.zeros(shape), 0)


def test_the_output_goes_with_the_loss_if_it_is_wanted() -> None:
    part, output = torch.tensor(1.0), {"logits": torch.ones(2, requires_grad=True) * 2, "rows": 2}
    stage = SimpleNamespace(layers=[SimpleNamespace(number=0)], training=True)
    run = LossRun(InnerLoss(lambda output, target: part), stage, trains=True)  # type: ignore[arg-type]
    assert run.outputs(output, torch.ones(2), 0, None, grad=False) == ((part,), None)
    run = LossRun(InnerLoss(lambda output, target: part, keeps_output=True), stage, trains=True)  # type: ignore[arg-type]
    (first, logits), structure = run.outputs(output, torch.ones(2), 0, None, grad=False)
    assert first is part
    assert not logits.requires_grad
    assert structure is not None
    assert repr(structure) == repr(flatten(output)[1])


def test_parts_are_added_in_their_order() -> None:
    parts = [torch.tensor(value, requires_grad=True) for value in (1e8, 1.0, -1e8)]
    assert total(parts).item() == ((torch.tensor(1e8) + 1.0) - 1e8).item() == 0.0
    assert not total(parts).requires_grad
    assert total(parts[:1]).item() == 1e8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_weight_on_a_device_gives_the_bits_of_a_number(dtype: torch.dtype) -> None:
    counts = [7, 0, 1022, 3]
    on_device = InnerLoss(mean, weights=mean_weights(torch.tensor(counts)), micro_batches=4)
    on_host = InnerLoss(mean, weights=mean_weights(counts), micro_batches=4)
    for micro_batch, value in enumerate([1.1, math.nan, 0.7, -2.3]):
        results = []
        for inner in (on_device, on_host):
            leaf = torch.tensor(value, dtype=dtype, requires_grad=True)
            part = inner.part(leaf, micro_batch)
            if part.requires_grad:  # a number of 0 gives 0 without a graph, a tensor 0 or NaN times 0
                part.backward(torch.tensor(8.0, dtype=dtype))
            results.append([part.detach(), torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.nan_to_num(0.0)])
        assert all(torch.equal(actual, expected) for actual, expected in zip(*results, strict=True))
        assert part.dtype is dtype
