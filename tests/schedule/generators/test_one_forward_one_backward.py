import pytest

from pipework.schedule import Costs, eager_1f1b, one_forward_one_backward, simulate

SIZES = [(1, 1), (1, 4), (2, 8), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32), (16, 64)]


@pytest.mark.parametrize(("workers", "micro_batches"), SIZES)
def test_1f1b(workers, micro_batches):
    result = simulate(one_forward_one_backward(workers, micro_batches))
    assert result.makespan == 3 * (micro_batches + workers - 1)
    assert result.peak_memory == tuple(min(micro_batches, workers - worker) for worker in range(workers))


def test_transfers_are_hidden_by_eager_1f1b():
    def slope(schedule):
        return (simulate(schedule, Costs(transfer=0.125)).makespan - simulate(schedule).makespan) / 0.125

    assert (slope(eager_1f1b(8, 32)), slope(one_forward_one_backward(8, 32))) == (14, 68)
    assert simulate(eager_1f1b(4, 16)).peak_memory == (7, 5, 3, 1)
