"""Layers that another process trains have no memory, and say so."""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from pipework.model.release import release_layers, released_from


def test_memory_is_freed_and_every_use_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4), nn.BatchNorm1d(4), nn.ReLU())
    model[1](torch.ones(1, 1, 4))[0].sum().backward()
    kept = weakref.ref(model[0].weight)
    tensors = [*model[1].parameters(), *model[2].parameters(), *model[2].buffers()]
    gone = [weakref.ref(tensor) for tensor in tensors] + [weakref.ref(model[1].weight_ih_l0.grad)]
    del tensors
    release_layers([(name, model[int(name)], "rank 1") for name in "123"], [model[0]])
    gc.collect()
    assert kept() is not None
    assert [reference() for reference in gone] == [None] * len(gone)
    for layer in (model[1], model[2]):
        assert {tensor.device.type for tensor in (*layer.parameters(), *layer.buffers())} == {"meta"}
    assert torch.equal(model[3](torch.ones(1)), torch.ones(1))
    with pytest.raises(RuntimeError, match=r"layer '1' \(LSTM\) has no values in this process: rank 1 trains it"):
        model(torch.ones(1, 1, 4))
    with pytest.raises(RuntimeError, match=r"save_checkpoint saves those of all, and `python -m pipework convert`"):
        model.state_dict()
    assert list(model[0].state_dict()) == ["weight", "bias"]
    with pytest.raises(RuntimeError, match=r"before the pipe is made, or a checkpoint into the pipe"):
        model.load_state_dict({})
    for copied in (copy.deepcopy, pickle.dumps, lambda whole: torch.save(whole, io.BytesIO())):
        with pytest.raises(RuntimeError, match=r"'1' \(LSTM\) has no values .* pipework\.save_checkpoint saves those"):
            copied(model)


def test_a_parameter_of_another_process_says_so_and_can_be_swapped() -> None:
    layer = nn.Linear(2, 2)
    release_layers([("1", layer, "rank 1")], [])
    assert released_from(layer.weight) == ("1.weight", "rank 1")
    assert released_from(nn.Linear(2, 2).weight) is None
    torch.utils.swap_tensors(layer.weight, nn.Parameter(torch.empty(2, 2, device="meta")))
