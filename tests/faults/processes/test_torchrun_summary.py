"""What torchrun says at the end of a job that has failed: the exit code of who failed first, and with `record` why."""

from collections.abc import Callable

import pytest

from tests.faults.processes.launching import Launch

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("recorded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_root_cause_is_the_rank_that_failed(launch: Callable[..., Launch], recorded: bool) -> None:
    fault = "rank=1,step=2,action=B,micro_batch=1,kind=raise"
    launched = launch(*(["--record"] if recorded else []), fault=fault)
    assert launched.wait() == 1, launched.log
    assert not launched.left_over()
    assert f"an injected fault strikes: {fault}" in launched.log
    summary = launched.log.split("Failures:")[1]
    failed = summary.split("rank      : 1 (local_rank: 1)")[1]
    assert failed.splitlines()[1].split()[:3] == ["exitcode", ":", "70"], launched.log
    assert (f"InjectedFault: injected on purpose: {fault}" in failed) == recorded
    assert ("To enable traceback see" in failed) != recorded
    if not recorded:  # else torchrun goes by full seconds, in which both may have raised their errors
        assert "rank      : 1 (local_rank: 1)" in summary.split("Root Cause (first observed failure):")[1]


def test_a_rank_that_is_asked_to_leave_leaves_as_ever(launch: Callable[..., Launch]) -> None:
    """`record` sees the SystemExit, too."""
    fault = "rank=0,step=2,action=B,micro_batch=1,kind=terminate"
    launched = launch("--record", "--heedless", "--steps", "2000", fault=fault)
    assert launched.wait() == 1, launched.log
    assert not launched.left_over()
    assert "exitcode  : 143" in launched.log
    assert launched.log.count("leaving before the next training step, as a process was asked to end") >= 1
