"""Wrong uses of `profile` and `plan`: an error says what was got and what is wanted, before anything is measured."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import plan
from pipework.planning import Rates, profile
from tests.planning.made_profiles import made

X, Y = torch.zeros(16, 8), torch.zeros(16, 8)
PROFILE = made([1.0] * 8)


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("the layers are measured although an argument is wrong")

    monkeypatch.setattr("pipework.planning.measuring.profile.measure_stages", refuse)


OF_A_MODEL: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"sample": None}, TypeError, "plan got no sample|inputs do not have any tensors"),
    ({"sample": torch.tensor(1.0)}, ValueError, "'input 0' is 0-dimensional"),
    ({"sample": X[:0], "target": Y[:0]}, ValueError, "the sample has no rows"),
    ({"module": nn.Sequential(nn.LazyLinear(4), nn.ReLU())}, ValueError, "parameter '0.weight' is lazy"),
    ({"module": nn.Sequential()}, ValueError, "the module has no layers"),
    ({"module": nn.Sequential}, TypeError, "must be nn.Sequential to be partitioned, got the class"),
    ({"target": "y"}, TypeError, "target is 'y': wanted a tensor"),
    ({"loss_fn": "mse"}, TypeError, "loss_fn is 'mse': wanted a function"),
    ({"devices": 2}, TypeError, "devices must be a list"),
    ({"devices": []}, ValueError, "devices is empty"),
    ({"devices": ["gpu"]}, ValueError, "devices.0. is 'gpu', which PyTorch does not know"),
    ({"timeout": -1}, ValueError, "timeout is -1: wanted a finite number of seconds"),
    ({"progress": True}, TypeError, "progress is True: wanted a function"),
]


@pytest.mark.parametrize(("options", "error", "message"), OF_A_MODEL)
@pytest.mark.parametrize("call", [plan, profile])
def test_of_a_model(call: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"module": model(), "sample": X, "target": Y, "loss_fn": F.mse_loss, "devices": ["cpu", "cpu"], **options}
    with pytest.raises(error, match=message):
        call(given.pop("module"), given.pop("sample"), **given)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rows": 4}, TypeError, "rows is 4: wanted a sequence"),
        ({"rows": [0]}, ValueError, r"rows is .0.: wanted sizes of micro-batches from 1 to 16"),
        ({"rows": []}, ValueError, r"rows is ..: wanted sizes"),
        ({"rates": {}, "devices": None}, TypeError, "rates is .*wanted Rates by the name"),
        ({"rates": {"a": None}}, ValueError, "give either devices=, which are measured, or rates="),
        ({"rates": Rates(1.0, 1.0), "workers": 0, "devices": None}, ValueError, "workers is 0"),
    ],
)
def test_of_a_profile(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        profile(model(), X, **{"devices": ["cpu"], **options})


OF_A_SEARCH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"memory": float("nan")}, ValueError, "memory is nan: wanted a finite amount above 0"),
    ({"memory": "24 Gigs"}, ValueError, "memory is '24 Gigs': wanted a number and a unit"),
    ({"memory": [1000, 1000]}, TypeError, "memory is .1000, 1000.: wanted a number of bytes"),
    ({"offload": "activations"}, TypeError, "offload is .activations.: wanted True"),
    ({"memory": {"tpu": 5}}, ValueError, "memory names 'tpu', which is none of the devices"),
    ({"batch": 1.5}, TypeError, "batch is 1.5, a float"),
    ({"chunks": 999}, ValueError, "chunks is 999, and a mini-batch has"),
    ({"optimizer": torch.optim.SGD(model().parameters())}, ValueError, "(?s)optimizer is SGD.*: wanted a number"),
    ({"optimizer": -1}, ValueError, "optimizer is -1"),
    ({"schedules": ["forward-only"]}, ValueError, "no backwards"),
    ({"schedules": []}, ValueError, "schedules is empty"),
    ({"chunks": []}, ValueError, "chunks is empty"),
    ({"schedules": [3]}, TypeError, "schedules has 3: wanted names"),
    ({"schedules": "1f1b"}, TypeError, r"schedules is '1f1b': wanted a sequence such as \['1f1b'\]"),
    ({"schedules": ["1f2b"]}, ValueError, "no schedule is called '1f2b': did you mean '1f1b'"),
    ({"seconds": None}, ValueError, "seconds is None: wanted a number above 0 .*, or iterations= in its place"),
    ({"iterations": 2.5}, TypeError, "iterations is 2.5, a float"),
]


@pytest.mark.parametrize(("options", "error", "message"), OF_A_SEARCH)
@pytest.mark.parametrize("model_is_there", [True, False])
def test_of_a_search(options: dict[str, Any], error: type[Exception], message: str, model_is_there: bool) -> None:
    arguments: list[Any] = [PROFILE]
    given: dict[str, Any] = {"devices": ["device"] * 2, **options}
    if model_is_there:
        arguments, given = [model(), X], {**given, "target": Y, "loss_fn": F.mse_loss, "devices": ["cpu", "cpu"]}
    with pytest.raises(error, match=message):
        plan(*arguments, **given)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (["profile.json", X], {"devices": ["cpu"]}, TypeError, "module must be nn.Sequential .*, got str"),
        ([PROFILE], {}, TypeError, "devices is None: wanted a sequence such as"),
        ([PROFILE], {"devices": 2}, TypeError, "devices is 2: wanted a sequence"),
        ([PROFILE], {"devices": [None]}, ValueError, "no times for device 'None': it knows 'device'"),
        ([PROFILE], {"devices": ["device"] * 9}, ValueError, "there are 9 devices and 8 layers"),
        ([model(), X], {"devices": ["cpu"] * 4, "target": Y}, ValueError, "there are 4 devices and 3 layers"),
        ([PROFILE, X], {"devices": ["device"]}, ValueError, "plan got a profile and sample="),
        ([PROFILE], {"devices": ["device"], "target": Y}, ValueError, "plan got a profile and target="),
    ],
)
def test_of_models_and_devices(
    arguments: list[Any], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    loss = {"loss_fn": F.mse_loss} if "target" in options else {}
    with pytest.raises(error, match=message):
        plan(*arguments, **options, **loss)


def test_too_few_layers_for_a_schedule() -> None:
    with pytest.raises(ValueError, match=r"schedules 'zb-v' have several .* 1 layer for 1 device do not allow"):
        plan(made([1.0]), devices=["device"], schedules=["zb-v"], iterations=5)
