"""The error and the exit codes."""

import copy
import pickle

import pytest

from pipework import PipelineError
from pipework.distributed.health.errors import LOCAL_ERROR, LOST_PEER, PEER_FAILED, PREEMPTED, exit_code


def test_it_says_who_where_and_what() -> None:
    error = PipelineError(
        "rank 2 (stage 2) failed in stage 2, micro-batch 3, action F: ValueError: bad row",
        rank=2,
        where="stage 2, micro-batch 3, action F",
        traceback_text="Traceback (most recent call last):\n  ...\nValueError: bad row\n",
    )
    assert isinstance(error, RuntimeError)
    for each in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (each.rank, each.where, each.kind) == (2, "stage 2, micro-batch 3, action F", "error")
        assert str(each) == (
            "rank 2 (stage 2) failed in stage 2, micro-batch 3, action F: ValueError: bad row\n\n"
            "the traceback of rank 2:\n"
            "    Traceback (most recent call last):\n      ...\n    ValueError: bad row"
        )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(), LOCAL_ERROR),
        (PipelineError("text"), PEER_FAILED),
        (PipelineError("text", kind="left"), PEER_FAILED),
        (PipelineError("text", kind="lost"), LOST_PEER),
        (SystemExit(), 0),
        (SystemExit(PREEMPTED), 143),
        (SystemExit("a message"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(error: BaseException, code: int) -> None:
    assert exit_code(error) == code
