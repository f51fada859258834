from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework.planning import profile
from pipework.planning.measuring.rates import Rates, rated_clock
from tests.planning.measuring.test_profile import QUICK, layers

RATES = {"fast": Rates(1e12, 1e11, memory=2**30), "slow": Rates(1e10, 1e9, launch=1e-4)}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bytes_are_those_of_a_measurement(device: str) -> None:
    x, y = torch.zeros(16, 8), torch.zeros(16, 4)
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "rows": [2, 8]}
    estimated = profile(layers().to(device), x.to(device), target=y.to(device), rates=RATES, **given)
    measured = profile(layers(), x, target=y, **QUICK, **given)
    for one, other in zip(estimated.bytes, measured.bytes, strict=True):
        assert [each._replace(temporary=0) for each in one] == [each._replace(temporary=0) for each in other]
    assert all(kind.estimated for kind in estimated.kinds.values())
    assert estimated.kinds["fast"].memory == 2**30
    assert not any(kind.estimated for kind in measured.kinds.values())


def test_each_operator_is_as_fast_as_it_can_be_and_views_take_no_time() -> None:
    rates = Rates(operations=1000.0, bytes_per_second=100.0, launch=2.0)
    with torch.device("meta"), rated_clock(rates) as now:
        x = torch.empty(4, 8)
        begin = now()
        x.view(8, 4).t()[2:]
        assert now() == begin
        x.add_(1)
        assert now() - begin == pytest.approx(2.56)  # 256 bytes
        begin = now()
        torch.empty(())
        assert now() - begin == 2.0  # the launch
        begin = now()
        x @ x.t()
        assert now() - begin == pytest.approx(3.2)  # 320 bytes: 256 operations would take less
    linear, x = nn.Sequential(nn.Linear(256, 256, bias=False)), torch.zeros(64, 256, requires_grad=True)
    found = profile(linear, x, rates={"computes": Rates(1e9, 1e30, launch=1e-30)}, rows=[64])
    assert found.kinds["computes"].seconds[0][0] == pytest.approx([2 * 64 * 256 * 256 / 1e9] * 3)


def test_rates_are_positive_numbers() -> None:
    for name in ("operations", "bytes_per_second", "memory", "launch"):
        with pytest.raises(ValueError, match=f"Rates: {name} is 0: wanted a finite number above 0"):
            Rates(**{"operations": 1.0, "bytes_per_second": 1.0, name: 0})
    with pytest.raises(ValueError, match="Rates: memory is '80GiB': wanted a finite number"):
        Rates(1e12, 1e12, memory="80GiB")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "message"),
    [
        ([RATES["fast"]], r"rates is \[Rates.*: wanted Rates by the name of each kind, such as"),
        ({"gpu": 1e12}, r"rates is \{'gpu': .*: wanted Rates by the name"),
        ({0: RATES["fast"]}, "rates is .0.*wanted Rates by the name"),
    ],
)
def test_other_rates_are_refused(rates: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        profile(layers(), torch.zeros(16, 8), rates=rates)
