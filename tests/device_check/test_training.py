import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from pipework.device_check.training import CPU, FIRST, SETTINGS, _trained, cases_of

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize("place", [(ONE, ONE), (ONE, TWO), (ONE, CPU), (CPU, ONE)])
def test_the_first_cases_have_every_setting(place: tuple[torch.device, torch.device]) -> None:
    cases = list(islice(cases_of(*place), FIRST))
    for name, values in SETTINGS.items():
        assert {getattr(case, name) for case in cases} == {*values}
    assert {device for case in cases for device in case.devices} == {case.batch_on for case in cases} - {CPU} | {*place}
    assert [case.batch_on for case in cases if case.pinned and case.delayed == "layers"] == [CPU]
    assert any(case.autocast and case.way == "zb-h1" for case in cases)
    assert any(case.delayed == "copies" and case.input_gradient for case in cases)
    assert cases == list(islice(cases_of(*place), FIRST))


def test_no_memory_is_pinned_without_an_accelerator() -> None:
    assert not any(case.pinned for case in islice(cases_of(CPU, CPU), 200))


def test_what_a_step_computed_is_freed_before_memory_is_overwritten() -> None:
    model, alive = nn.Linear(2, 2), []

    def steps() -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        for step in range(2):
            x = torch.ones(3, 2, requires_grad=True)
            output = model(x)
            loss = output.sum()
            loss.backward()
            computed = [weakref.ref(each) for each in (loss, output, x)]
            yield step, loss, output, x
            del loss, output, x
            alive.extend(each() for each in computed)

    _trained(model, steps())
    assert alive == [None] * 6
