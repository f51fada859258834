"""What a rank's generator is set to after a failure; tests/distributed/together/test_generators.py has the calls."""

from collections.abc import Callable

import pytest
import torch

from pipework.distributed.generator_states import GeneratorStates
from pipework.distributed.health.status import PeerFailure
from pipework.runtime.random.streams import draw_key


def drawn(*steps: Callable[[], object]) -> float:
    """What the generator gives after these steps."""
    torch.manual_seed(0)
    for step in steps:
        step()
    return torch.rand(()).item()


def own() -> float:
    """What the program draws between two calls."""
    return torch.rand(()).item()


class Rank(GeneratorStates):
    """Has made a training call, and drawn numbers of its own; and begins another, unless it is late."""

    def call_twice(self, *, counts: bool = False, draws: bool = True, begins: bool = True) -> None:
        self.enter()
        draw_key()
        self.leave()
        own()
        if begins:
            self.enter()
            if draws:
                draw_key()
            self.has_drawn, self.counts = draws, counts


@pytest.mark.parametrize("counts", [False, True])
def test_of_a_failed_call_all_have_drawn_or_none(counts: bool) -> None:
    expected = drawn(draw_key, own, *[draw_key] * counts)
    failure = PeerFailure(1, "error", "failed", call=2, counts=counts)
    late, here, failed = Rank(), Rank(), Rank()
    assert drawn(lambda: late.call_twice(draws=False), lambda: late.align(failure)) == expected
    assert drawn(here.call_twice, lambda: here.align(failure)) == expected
    assert drawn(lambda: failed.call_twice(counts=counts), lambda: failed.align(None)) == expected


def test_a_rank_that_was_done_forgets_its_next_call() -> None:
    rank, failure = Rank(), PeerFailure(1, "error", "failed", call=1, counts=True)
    assert drawn(rank.call_twice, lambda: rank.align(failure)) == drawn(draw_key)


@pytest.mark.parametrize("counts", [False, True])
def test_a_rank_that_is_late_draws_what_counts(counts: bool) -> None:
    rank, failure = Rank(), PeerFailure(1, "error", "failed", call=2, counts=counts)
    expected = drawn(draw_key, own, *[draw_key] * counts)
    assert drawn(lambda: rank.call_twice(begins=False), lambda: rank.align(failure)) == expected


def test_a_later_failure_changes_nothing() -> None:
    rank, expected = Rank(), drawn(draw_key, own, own, own)
    assert drawn(rank.call_twice, lambda: rank.align(None), own, rank.enter, own, lambda: rank.align(None)) == expected
