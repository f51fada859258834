"""A budget of seconds, or of simulated candidates."""

import time
from math import inf

import pytest

from pipework.planning.search.budget import SearchBudget, checked_budget


def spend(budget: SearchBudget, candidates: int, seconds: float = 0.0) -> None:
    for _ in range(candidates):
        budget.spend(lambda: time.sleep(seconds))


def test_candidates_are_counted() -> None:
    budget = checked_budget(None, 8)
    spend(budget, 2)
    assert budget.share() == 0.25


def test_time_is_kept_for_what_comes_after_the_search() -> None:
    budget = SearchBudget(seconds=1000.0)
    assert budget.share() < 0.01
    spend(budget, 2, seconds=0.05)
    assert 4 * 0.05 <= budget.share() * 1000 < 4
    budget = SearchBudget(seconds=0.2)
    spend(budget, 1, seconds=0.1)
    assert 0.75 <= budget.share() < 1.5  # 0.1 of 0.2 seconds, and at most a quarter is kept


def test_a_candidate_counts_when_it_has_ended() -> None:
    budget = SearchBudget(iterations=2)
    with pytest.raises(ValueError, match="refused"):
        budget.spend(lambda: (_ for _ in ()).throw(ValueError("refused")))
    assert budget.used == 0


def test_parts_of_a_budget() -> None:
    seconds, candidates = SearchBudget(seconds=10.0).part(0.6), SearchBudget(iterations=10, used=7).part(0.25)
    assert (seconds.seconds, seconds.iterations) == (6.0, inf)
    assert (candidates.seconds, candidates.iterations, candidates.used) == (inf, 2.5, 0)
    assert SearchBudget(iterations=2).part(0.1).iterations == 1  # at least one candidate


@pytest.mark.parametrize("seconds", [0, -1.0, inf, None, True, "3"])
def test_no_number_of_seconds(seconds: object) -> None:
    with pytest.raises(ValueError, match="wanted a number above 0 and not infinite, or iterations= in its place"):
        checked_budget(seconds, None)  # type: ignore[arg-type]
