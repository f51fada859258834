"""What ranks agree on at the beginning of a call: here the losses that were brought backward before."""

import pytest

from pipework.autograd.factor import Factor
from pipework.distributed.step_calls import Delivered, DeliveredLosses


@pytest.fixture
def here() -> DeliveredLosses:
    return DeliveredLosses()


@pytest.fixture
def there() -> DeliveredLosses:
    return DeliveredLosses()


def test_the_first_difference_is_told(here: DeliveredLosses, there: DeliveredLosses) -> None:
    for call in range(1, 6):
        for rank, losses in enumerate((here, there)):
            losses.begin_call()
            delivered = losses.expect()
            if rank == 0 or call not in (3, 4):
                delivered(Factor(1.0))
    assert here.difference(there.marks) == (3, True)
    assert there.difference(here.marks) == (3, False)
    without = DeliveredLosses()
    for _ in range(5):
        without.begin_call()  # a rank without a loss is not compared
    assert here.difference(without.marks) is without.difference(here.marks) is None


def test_a_backward_may_come_late_and_twice_and_never(here: DeliveredLosses, there: DeliveredLosses) -> None:
    delivered = []
    for losses in (here, there):
        losses.begin_call()
        delivered.append(losses.expect())
    for age in range(100):  # compared now and then, before and after
        assert here.difference(there.marks) is None
        if age == 20:
            delivered[0](Factor(1.0))
            assert here.difference(there.marks) == (1, True)
            delivered[1](Factor(1.0))
            delivered[1](Factor(1.0))
        for losses in (here, there):
            losses.begin_call()
            losses.expect()
    delivered[0](Factor(1.0))  # too late to be remembered
    assert here.marks == there.marks
    assert len(here.marks) == 32


def test_the_factor_of_the_last_call_and_backward_is_told(here: DeliveredLosses) -> None:
    assert here.told(waits=True) == Delivered()
    here.begin_call()
    before = here.expect()
    here.begin_call()
    delivered = here.expect()
    delivered(Factor(2.0))
    delivered(Factor(0.5))
    before(Factor(3.0))
    assert here.told(waits=False)[1:] == (2, 0.5)


def test_factors_of_one_call_are_compared() -> None:
    def differ(one: float, other: float, call: int = 1) -> bool:
        return Delivered("", 1, one).has_other_factor(Delivered("", call, other))

    assert differ(1.0, 0.5)
    assert differ(1.0, 0.0)
    assert differ(1.0, float("nan"))
    assert not differ(1.0, 1.0 + 1e-6)
    assert not differ(float("nan"), float("nan"))
    assert not differ(float("inf"), float("inf"))
    assert not differ(1.0, 0.5, call=2)
    assert not Delivered().has_other_factor(Delivered("", 0, 2.0))
