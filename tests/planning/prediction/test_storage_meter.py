"""What operators make and free; tests/prediction/test_predict.py compares it with an accelerator's own count."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipework.planning.prediction import storage_meter
from pipework.planning.prediction.storage_meter import StorageMeter

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


def test_what_was_there_before_is_not_counted_nor_are_its_views() -> None:
    weight, constant = torch.ones(16, 16), torch.ones(256)
    meter = StorageMeter(CPU, [weight])
    with meter:
        assert weight.t().is_contiguous() is False
        assert constant[:10].sum() == 10
    assert meter.live == 0
    assert meter.peak < 16


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


def test_a_forward_and_its_backward() -> None:
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    x = torch.randn(16, 64)  # 4 KiB, as all activations; a weight has 16 KiB
    meter = StorageMeter(CPU, [x, *layers.parameters()])
    with meter:
        loss = layers(x).sum()
        assert meter.live == 4 * KIB + 4  # what tanh saves, and the loss
        functional.relu(loss).backward()
        del loss
    assert meter.live == 32 * KIB
    layers.zero_grad()
    assert meter.live == 0


def test_other_devices_and_tensors_without_storage_do_not_count() -> None:
    meter = StorageMeter(torch.device("meta"))
    with meter:
        kept = torch.empty(8, device="meta"), torch.ones(8), torch.eye(4).to_sparse()
    assert meter.live == 32
    del kept
    assert meter.live == 0


def test_neither_the_meter_nor_what_it_has_seen_stays_alive() -> None:
    layer = nn.Linear(4, 4)
    meter = StorageMeter(CPU, layer.parameters())
    with meter:
        layer(torch.ones(1, 4)).sum().backward()
    gone = weakref.ref(layer.weight)
    del layer, meter
    gc.collect()
    assert gone() is None
