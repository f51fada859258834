"""A rank that dies is missed by all others within two seconds, by its name."""

import signal
from typing import Any

import pytest

from tests.faults.processes.training import BOUND, PATIENCE, Failing, assert_clean_exit

# Every kind of action of a pipeline, on a rank that has it.
ACTIONS = {
    0: ("F", "B", "SEND_F", "RECV_B", "optimizer", "save"),
    1: ("F", "B", "SEND_F", "SEND_B", "RECV_F", "RECV_B", "optimizer", "save"),
    2: ("F", "B", "SEND_B", "RECV_F", "optimizer", "save"),
}


def check_death(failing: Failing, fault: str, dead: int, ranks: int = 3, **options: Any) -> None:
    outcome = failing(ranks, fault, **options)
    assert outcome.ended[dead].code == -signal.SIGKILL, outcome.ended[dead].errors
    assert outcome.raised.keys() == set(range(ranks)) - {dead}, [each.errors for each in outcome.ended]
    for rank, error in outcome.raised.items():
        assert error.type == "PipelineError"
        assert (error.rank, error.kind) == (dead, "lost"), error.text
        assert f"rank {dead} (stage" in error.text
        assert "(pid " in error.text
        assert "none yet" not in error.text
        assert_clean_exit(outcome.ended[rank])
        assert outcome.ended[rank].code == 72
    assert outcome.seconds <= BOUND * PATIENCE


@pytest.mark.parametrize(
    "fault",
    [
        "rank=1,step=2,action=F,micro_batch=2,kind=kill",
        "rank=2,step=0,action=B,kind=kill",
        "rank=0,step=3,action=SEND_F,kind=kill",
        "rank=1,step=2,action=optimizer,kind=kill",
        "rank=1,step=1,action=save,kind=kill",
    ],
)
def test_death(failing: Failing, fault: str) -> None:
    check_death(failing, fault, int(fault[5]))


def test_death_of_the_rank_that_has_the_store(failing: Failing) -> None:
    check_death(failing, "rank=0,step=1,action=B,kind=kill", 0, ranks=2, own_store=True)


def test_death_in_a_replica(failing: Failing) -> None:
    check_death(failing, "rank=2,step=1,action=B,kind=kill", 2, ranks=4, init={"dp": 2})


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "action"), [(rank, action) for rank in ACTIONS for action in ACTIONS[rank]])
def test_death_at_each_action(failing: Failing, rank: int, action: str) -> None:
    check_death(failing, f"rank={rank},step=1,action={action},kind=kill", rank)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("action", ["F", "I", "W"])
def test_death_in_split_backwards(failing: Failing, rank: int, action: str) -> None:
    check_death(failing, f"rank={rank},step=1,action={action},kind=kill", rank, schedule="zb-h1")
