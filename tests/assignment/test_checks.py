import re

import pytest
import torch
from torch import nn

from pipework.assignment.checks import checked_balance


@pytest.mark.parametrize("balance", [[1, 2], (1, 2), torch.tensor([1, 2])])
def test_integers_of_any_make_that_sum_to_the_layers(balance):
    assert checked_balance(balance, 3) == [1, 2]


@pytest.mark.parametrize(
    "balance", [[], [3, 1], [1, 1], [0, 3], [-1, 4], [1.0, 2.0], [True, 2], ["3"], [1, 1, 1, 1], [None, 3]]
)
def test_the_error_says_the_right_sum_and_shows_a_line_that_runs(balance):
    with pytest.raises(ValueError, match="positive integers that sum to 3") as caught:
        checked_balance(balance, 3)
    assert str(balance) in str(caught.value)
    names = {"module": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()), "sample": torch.rand(2, 2)}
    for line in re.findall(r"^    (.*)$", str(caught.value), re.MULTILINE):
        exec(line.replace("sample)", "sample, timeout=0)"), names)
    assert sum(names["balance"]) == 3


@pytest.mark.parametrize("balance", [2, "auto", b"12", 1.5])
def test_a_balance_that_is_no_list(balance):
    message = (
        rf"must list the number of layers of each partition, got {balance!r}: write balance=\[3, 2\], or .*by_time"
    )
    with pytest.raises(TypeError, match=message):
        checked_balance(balance, 5)
