"""What operators make and free; test_predict.py compares it with an accelerator's own count."""

import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from pipework.planning.measuring import storage_meter
from pipework.planning.measuring.storage_meter import StorageMeter, optimizer_bytes
from pipework.runtime.host_optimizer import HostOptimizer

CPU = torch.device("cpu")
KIB = 1024


def test_what_operators_make_and_free_is_counted_at_every_moment() -> None:
    meter = StorageMeter(CPU)
    with meter:
        x = torch.zeros(256)
        y = x + 1
        assert (meter.live, meter.peak) == (2 * KIB, 2 * KIB)
        del x
        assert (meter.live, meter.peak) == (KIB, 2 * KIB)
        assert meter.begin() == KIB == meter.peak
        y.mul_(2)
        view = y.view(16, 16).t()
        assert meter.peak == KIB
        del y
        assert meter.live == KIB
        del view
    assert meter.live == 0
    assert 0 < meter.mean <= KIB


def test_what_an_operator_frees_before_it_ends_counts_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    freed = iter([0, 10 * KIB, 12 * KIB, 12 * KIB])  # before and after each operator
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda _: {"allocated_bytes.all.freed": next(freed)})
    monkeypatch.setattr(storage_meter, "is_accelerator", lambda _: True)
    meter = StorageMeter(CPU)
    with meter:
        x = torch.zeros(256)
        assert (meter.live, meter.peak) == (KIB, 11 * KIB)
        meter.begin()
        assert (x + 1).shape == (256,)
    assert meter.peak == 2 * KIB


def test_what_does_not_count() -> None:
    """What was there before, views of it, other devices, and tensors without storage."""
    weight, constant = torch.ones(16, 16), torch.ones(256)
    meter, on_meta = StorageMeter(CPU, [weight]), StorageMeter(torch.device("meta"))
    with meter, on_meta:
        views = weight.t(), constant[:10]
        made = torch.empty(8, device="meta"), torch.ones(8), torch.eye(4).to_sparse()
        assert on_meta.live == 32
    del views, made
    assert (meter.live, on_meta.live) == (0, 0)


def test_neither_the_meter_nor_what_it_has_seen_stays_alive() -> None:
    layer = nn.Linear(4, 4)
    meter = StorageMeter(CPU, layer.parameters())
    with meter:
        layer(torch.ones(1, 4)).sum().backward()
    gone = weakref.ref(layer.weight)
    del layer, meter
    gc.collect()
    assert gone() is None


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16).requires_grad_(False))


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, momentum=0.9),
        torch.optim.Adam,
        functools.partial(torch.optim.AdamW, amsgrad=True),
        torch.optim.Adagrad,
    ],
)
def test_the_state_is_that_of_a_real_step(make: Any) -> None:
    module = layers()
    optimizer = make([{"params": module[0].parameters(), "lr": 0.5}, {"params": module[1].parameters()}])
    stages = [[*module[0].parameters()], [*module[1].parameters(), *module[2].parameters()]]
    predicted = optimizer_bytes(optimizer, stages, CPU)
    module(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    real = [
        sum(
            tensor.nbytes
            for parameter in stage
            for name, tensor in optimizer.state[parameter].items()
            if isinstance(tensor, torch.Tensor) and name != "step"
        )
        for stage in stages
    ]
    assert predicted[0] == real
    assert optimizer_bytes(optimizer, stages, CPU) == predicted
    assert optimizer_bytes(optimizer, [[*module[2].parameters()]], CPU) == ([0], 0)  # which are not trained
    assert optimizer_bytes(None, stages, CPU) == ([0, 0], 0)
    assert optimizer_bytes(1.5, stages[:1], CPU) == ([1.5 * 4 * 17 * 32], 0)
    assert optimizer_bytes(HostOptimizer(stages[0], torch.optim.AdamW), stages[:1], CPU) == optimizer_bytes(
        torch.optim.AdamW(stages[0]), stages[:1], CPU
    )


def test_an_optimizer_that_cannot_be_tried_is_refused_with_what_to_do() -> None:
    class Own(torch.optim.SGD):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module.parameters())

    module = layers()
    with pytest.raises(TypeError, match="optimizer=Adafactor"):  # reads numbers of its state
        optimizer_bytes(torch.optim.Adafactor(module.parameters()), [module.parameters()], CPU)
    with pytest.raises(TypeError, match=r"optimizer=Own: it could not be tried .* give a number instead"):
        optimizer_bytes(Own(module), [module.parameters()], CPU)
