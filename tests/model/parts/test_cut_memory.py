"""What a pipe holds of a model whose base is frozen: the base, the adapters, and what the schedule keeps."""

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.model.parts.harness import attached, loss_in
from tests.model.parts.models import WIDTH
from tests.model.parts.quantised import PackedLinear, Quantised

CHUNKS = 4
BATCH: dict[str, Any] = {"x": torch.ones(32, WIDTH), "labels": torch.ones(32, WIDTH)}


@pytest.fixture(autouse=True)
def of_this_test_alone() -> None:
    """What earlier tests left (sparse tensors and others without memory to ask for) is not looked at."""
    gc.collect()
    gc.freeze()


def held() -> dict[int, int]:
    """The bytes of each piece of memory that a tensor of this test has."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor)]
    storages = [each.untyped_storage() for each in tensors if not each.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def bytes_of(model: nn.Module, *, trained: bool) -> int:
    return sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad == trained)


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "schedule"), [(PackedLinear, "1f1b"), (nn.Linear, "zb-h1")])
def test_what_is_added_to_the_base(kind: type[nn.Linear], schedule: str) -> None:
    model = Quantised(kind, width=64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".up." in name or ".down." in name)
    adapters, base = (bytes_of(model, trained=trained) for trained in (True, False))
    assert adapters < base / 6
    before = held()
    pipe = attached(model, BATCH, chunks=CHUNKS, balance=[3, 3], schedule=schedule, checkpoint="never")
    after = held()
    assert sum(after.values()) - sum(before.values()) < adapters  # the pipe copies no parameter
    with pipe.record() as recording:
        loss_in(model(**BATCH)).backward()
    kept = [recording.timeline().peak_memory(worker) for worker in range(2)]
    assert kind is PackedLinear or sum(kept) < base / 4  # without the weights, although backward reads them
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert sum(gradient.nbytes for gradient in gradients) == adapters
    del recording
    grown = sum(size for place, size in held().items() if place not in after)
    assert grown < 1.5 * adapters  # nothing else of this size stays
