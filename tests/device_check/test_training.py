import weakref
from collections.abc import Iterator
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from pipework.device_check.training import CPU, SETTINGS, _trained, first_cases, further_cases

ONE, TWO = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.mark.parametrize("place", [(ONE, ONE), (ONE, TWO), (ONE, CPU), (CPU, ONE)])
def test_every_setting_is_drawn_in_time(place: tuple[torch.device, torch.device]) -> None:
    cases = list(islice(further_cases(*place), 200))
    for name, values in SETTINGS.items():
        assert {getattr(case, name) for case in cases} == {*values}
    assert {device for case in cases for device in case.devices} == {*place}
    assert {case.pinned for case in cases} == {True, False}
    assert all(case.batch_on == CPU for case in cases if case.pinned)
    assert cases == list(islice(further_cases(*place), 200))


def test_the_first_cases_of_a_device_have_every_value_but_of_copies() -> None:
    for name, values in SETTINGS.items():
        assert {getattr(case, name) for case in first_cases(ONE, ONE)} == {*values} - {"copies"}


def test_halves_of_backwards_are_tried_under_autocast_on_devices_and_links() -> None:
    assert all(any(c.autocast and c.way == "zb-h1" for c in first_cases(ONE, to)) for to in (ONE, TWO))


def test_no_memory_is_pinned_without_an_accelerator() -> None:
    assert not any(case.pinned for case in islice(further_cases(CPU, CPU), 200))


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
