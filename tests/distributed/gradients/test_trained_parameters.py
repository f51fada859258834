"""Fingerprints of the parameters that a replica trains."""

import pytest
import torch
from torch import Tensor

from pipework.distributed.gradients.trained_parameters import TrainedParameters


def parameters(count: int = 8, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    return [(f"layer.{n}", torch.ones(2, dtype=dtype, requires_grad=True)) for n in range(count)]


def difference(named: list[tuple[str, Tensor]], here: list[Tensor], there: list[Tensor], replicas: int = 2) -> str:
    trained = TrainedParameters(named)
    mine, theirs = trained.fingerprint(here).clone(), trained.fingerprint(there)
    with pytest.raises(ValueError, match="the replicas train different parameters") as caught:
        trained.refuse_differences(mine, mine * (replicas - 1) + theirs, replicas)
    return str(caught.value)


def test_the_same_is_no_difference() -> None:
    named = parameters()
    trained = TrainedParameters(named)
    mine = trained.fingerprint([tensor for _, tensor in named])
    assert trained.fingerprint([tensor for _, tensor in named]) is mine  # nothing is computed again
    trained.refuse_differences(mine, mine * 5, 5)


def test_what_only_some_train_is_named() -> None:
    named = parameters()
    every = [tensor for _, tensor in named]
    assert "different parameters: layer.7 is trained by some of them only" in difference(named, every, every[:-1], 3)
    text = difference(named, every[:1], every)
    assert "layer.1, layer.2, layer.3, layer.4, layer.5 and 2 more are trained by some of them only" in text


def test_another_form_is_a_difference() -> None:
    named = parameters()
    every = [tensor for _, tensor in named]
    for other in (every[::-1], [every[0].detach().double().requires_grad_(), *every[1:]]):
        text = difference(named, every, other)
        assert "their shapes, dtypes or order differ" in text or "is trained by some of them only" in text


def test_what_cannot_be_averaged_is_refused() -> None:
    with pytest.raises(TypeError, match=r"the parameter layer\.0, of torch\.float8_e5m2 .*cannot be averaged"):
        TrainedParameters(parameters(1, torch.float8_e5m2))
    trained = TrainedParameters([("layer.0", torch.ones(2))])
    with pytest.raises(TypeError, match=r"the parameter that was replaced, of torch\.float8_e5m2"):
        trained.fingerprint([torch.ones(2, dtype=torch.float8_e5m2, requires_grad=True)])
