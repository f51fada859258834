from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from pipework.schedule import Action
from pipework.schedule.generators.orders import in_rounds, nearly_equal_rounds, warm_up_then_alternate


@given(st.data(), st.integers(1, 50))
def test_rounds_are_nearly_equal_and_the_longer_ones_come_first(data, micro_batches):
    count = data.draw(st.integers(1, micro_batches))
    rounds = nearly_equal_rounds(micro_batches, count)
    assert list(chain.from_iterable(rounds)) == list(range(micro_batches))
    lengths = list(map(len, rounds))
    assert len(lengths) == count
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


@given(st.integers(0, 8), st.integers(0, 12))
def test_a_warm_up_longer_than_all_forwards_is_cut(count, warm_up):
    forwards, backwards = ([Action(kind, 0, number) for number in range(count)] for kind in "FB")
    order = warm_up_then_alternate(forwards, backwards, warm_up)
    assert sorted(order) == sorted([*forwards, *backwards])
    kinds = "".join(action.kind for action in order)
    ahead = min(warm_up, count)
    assert kinds == "F" * ahead + "FB" * (count - ahead) + "B" * ahead


def test_each_round_passes_all_stages():
    order = in_rounds("B", [3, 1], [range(2), range(2, 3)])
    assert " ".join(map(str, order)) == "3B0 3B1 1B0 1B1 3B2 1B2"
