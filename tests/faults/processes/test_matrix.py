"""Rows 1 to 5 of the fault matrix: a rank dies, raises, hangs or is slow, and all others learn of it in time.

Each row of the table is a job: the fault says which rank fails where and how, and the rest what the others raise.
"""

import signal
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.faults.processes.training import (
    BOUND,
    DETECT,
    PATIENCE,
    Failing,
    assert_clean_exit,
    fully_sharded,
    tensor_parallel,
    train,
)

CODES = {"error": 71, "stuck": 71, "lost": 72}  # of others
BODIES = {"": train, "tp": tensor_parallel, "fsdp": fully_sharded}


@dataclass(frozen=True)
class Case:
    """A fault, and what it is to the others.

    Attributes:
        kind: of the failure.
        sharded: whether ranks compute layers together, as with "tp" or "fsdp".
        options: of the job.
    """

    fault: str
    kind: str
    ranks: int = 3
    sharded: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.sharded} {self.fault}"


STUCK = {"init": {"detect": DETECT, "action_timeout": DETECT}}
SILENT = {"init": {"detect": DETECT}}
DEATHS = [
    Case("rank=1,step=2,action=F,micro_batch=2,kind=kill", "lost"),
    Case("rank=2,step=0,action=B,kind=kill", "lost"),
    Case("rank=0,step=3,action=SEND_F,kind=kill", "lost"),
    Case("rank=1,step=2,action=optimizer,kind=kill", "lost"),
    Case("rank=1,step=1,action=save,kind=kill", "lost"),
    Case("rank=0,step=1,action=B,kind=kill", "lost", 2, options={"own_store": True}),
    Case("rank=2,step=1,action=B,kind=kill", "lost", 4, options={"init": {"dp": 2}}),
    Case("rank=1,step=2,action=F,micro_batch=2,kind=kill", "lost", 4, "tp"),
    Case("rank=2,step=1,action=B,micro_batch=0,kind=kill", "lost", 4, "tp"),
    Case("rank=3,step=1,action=F,micro_batch=1,kind=kill", "lost", 4, "fsdp"),
    Case("rank=0,step=1,action=REDUCE_GRAD,kind=kill", "lost", 4, "fsdp"),
]
EXCEPTIONS = [
    Case("rank=1,step=1,action=F,micro_batch=2,kind=raise", "error"),
    Case("rank=2,step=2,action=B,micro_batch=0,kind=raise", "error"),
    Case("rank=0,step=1,action=save,kind=raise", "error"),
    Case("rank=0,step=2,action=RECV_B,micro_batch=1,kind=raise", "error"),
    # It would end, and the store with it, before others have read what it says.
    Case("rank=0,step=1,action=B,micro_batch=1,kind=raise", "error", 2, options={"own_store": True}),
    Case("rank=1,step=1,action=F,micro_batch=2,kind=raise", "error", 4, "tp"),
    Case("rank=2,step=1,action=UNSHARD,kind=raise", "error", 4, "fsdp", {"whole_stages": 1}),
]
HANGS = [
    Case("rank=1,step=1,action=B,micro_batch=3,kind=stop", "lost", options=SILENT),
    Case("rank=0,step=2,action=F,micro_batch=1,kind=hold_gil,seconds=20", "lost", 2, options=SILENT),
    Case("rank=1,step=1,action=F,micro_batch=1,kind=stop", "lost", 4, "tp", SILENT),
    Case("rank=1,step=1,action=F,micro_batch=1,kind=stop", "lost", 4, "fsdp", SILENT),
    # An endless loop lets heartbeats through: only a bound on the time of an action finds it.
    Case("rank=1,step=1,action=F,micro_batch=1,kind=hang", "stuck", options=STUCK),
    Case("rank=1,step=1,action=F,micro_batch=1,kind=hang", "stuck", 4, "tp", STUCK),
]
# Every kind of action of a pipeline, on a rank that has it.
EVERYWHERE = [
    pytest.param(Case(f"rank={rank},step=1,action={action},kind=kill", "lost", options=options), marks=pytest.mark.slow)
    for options, actions in (
        ({}, {0: "F B SEND_F RECV_B optimizer save", 1: "F B SEND_F SEND_B RECV_F RECV_B optimizer save",
              2: "F B SEND_B RECV_F optimizer save"}),
        ({"schedule": "zb-h1"}, dict.fromkeys(range(3), "F I W")),
    )
    for rank in actions
    for action in actions[rank].split()
]  # fmt: skip


@pytest.mark.parametrize("case", [*DEATHS, *EXCEPTIONS, *HANGS, *EVERYWHERE], ids=str)
def test_others_learn_of_a_fault_in_time(failing: Failing, case: Case) -> None:
    fault = dict(part.split("=") for part in case.fault.split(","))
    failed, how = int(fault["rank"]), fault["kind"]
    is_silent = how in ("stop", "hold_gil")
    hung = [failed] if is_silent else []
    outcome = failing(case.ranks, case.fault, body=BODIES[case.sharded], but=hung, **case.options)
    own, text = outcome.raised.pop(failed, None), f"injected on purpose: {case.fault}"
    where = None
    if "micro_batch" in fault and case.kind == "error" and not case.sharded:
        where = f"stage {failed}, micro-batch {fault['micro_batch']}, action {fault['action']}"

    assert outcome.raised.keys() == set(range(case.ranks)) - {failed}, [each.errors for each in outcome.ended]
    per_stage = {"": 1, "tp": 2, "fsdp": 2}[case.sharded]
    for rank, error in outcome.raised.items():
        errors = outcome.ended[rank].errors
        assert (error.type, error.rank, error.kind) == ("PipelineError", failed, case.kind), error.text
        if case.options.get("init", {}).get("dp") is None:
            assert f"rank {failed} (stage {failed // per_stage}" in error.text
        assert_clean_exit(outcome.ended[rank])
        assert outcome.ended[rank].code == CODES[case.kind]
        if case.kind == "error":
            assert f"InjectedFault: {text}" in error.text
            assert "Traceback (most recent call last)" in (error.traceback_text or "")
            assert where in (None, error.where)
        elif case.kind == "stuck":
            assert error.where == "F of stage 1, micro-batch 1" or case.sharded
            assert "rank 1 (stage " in error.text
            assert " is stuck: it has been busy for" in error.text
            assert "in strike" in (error.traceback_text or "")
        elif is_silent:
            assert "last action: " in error.text or "last seen " in error.text  # half a second before, perhaps
            assert case.sharded or errors.count("no heartbeat for") == 1, errors
        else:
            assert "(pid " in error.text
            assert "none yet" not in error.text
    assert outcome.seconds <= (BOUND if how in ("kill", "raise") else DETECT + 1.0) * PATIENCE

    ended = outcome.ended[failed]
    if how == "kill":
        assert ended.code == -signal.SIGKILL, ended.errors
    elif how == "raise":
        assert own is not None
        assert (own.type, own.text) == ("InjectedFault", text)
        assert where is None or f"pipework: {where}" in own.notes
        assert ended.code == 70
    elif how == "hang":  # nobody can end the loop, so the process is ended
        assert ended.code == 70, ended.errors
        assert "most recent call first" in ended.errors
        assert "its present action does not come to an end" in ended.errors


def test_who_waits_for_a_rank_that_died_cannot_be_held_up_by_a_layer(failing: Failing) -> None:
    """Rank 1 is in a layer that takes an hour while rank 0 dies."""
    slow = "rank=1,step=1,action=F,micro_batch=0,kind=sleep,seconds=3600"
    outcome = failing(2, f"{slow};rank=0,step=1,action=F,micro_batch=1,kind=kill", init={"detect": DETECT})
    assert [each.code for each in outcome.ended] == [-signal.SIGKILL, 72], outcome.ended[1].errors
    assert "rank 0 (stage 0)" in outcome.ended[1].errors


@pytest.mark.parametrize(
    "fault",
    [
        f"action=F,micro_batch=1,kind=sleep,seconds={2 * DETECT}",
        f"action=optimizer,kind=sleep,seconds={2 * DETECT}",
        f"action=B,micro_batch=1,kind=stop,seconds={DETECT / 2}",  # as when the network is gone for a moment
    ],
)
def test_a_rank_that_is_slow_or_away_for_a_moment_is_not_lost(failing: Failing, fault: str) -> None:
    outcome = failing(2, f"rank=1,step=1,{fault}", init={"detect": DETECT})
    assert not outcome.raised
    assert [each.code for each in outcome.ended] == [0, 0]
    assert outcome.ended[0].result == outcome.ended[1].result
    assert len(outcome.ended[0].result) == 4
