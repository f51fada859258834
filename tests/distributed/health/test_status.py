"""Heartbeats and failures as JSON, and calls as text."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from pipework.distributed.health.status import (
    KINDS,
    Beat,
    Call,
    PeerFailure,
    describe_exception,
    read_beat,
    write_beat,
)

CALL = Call().begun("training step").ended()
BEAT = Beat(7, True, CALL, "F of stage 0", 4711, "node0", "ValueError: no", (2, 3), {"stop": 1}, None, True)
FAILURE = asdict(PeerFailure(1, "lost", "text"))


def changed(original: str, /, **values: Any) -> bytes:
    return json.dumps({**json.loads(original), **values}).encode()


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    assert read_beat(write_beat(BEAT).encode()) == BEAT


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_read_as_it_was_written(kind: str) -> None:
    for failure in (PeerFailure(None, kind, "text"), PeerFailure(1, kind, "text", "stage 1", "Traceback ...")):
        beat = BEAT._replace(failure=failure)
        assert read_beat(write_beat(beat).encode()) == beat


@pytest.mark.parametrize(
    "values",
    [
        {"number": -1},
        {"number": True},
        {"number": 2**63},
        {"call": None},
        {"action": 3},
        {"pid": "1"},
        {"host": []},
        {"place": []},
        {"messages": [3]},
        *(
            {"failure": {**FAILURE, **wrong}}
            for wrong in ({"kind": "other"}, {"rank": 0.5}, {"text": None}, {"where": 1})
        ),
    ],
)
def test_a_heartbeat_with_one_wrong_field_is_ignored(values: dict[str, Any]) -> None:
    assert read_beat(changed(write_beat(BEAT), **values)) is None


def test_what_is_too_large_is_not_even_parsed() -> None:
    assert read_beat(write_beat(BEAT).encode() + b" " * 500_000) is None


def test_texts_are_cut_and_have_no_control_characters() -> None:
    beat = read_beat(changed(write_beat(BEAT), action="\x1b[31m" + "x" * 10_000))
    assert beat is not None
    assert beat.action.startswith("?[31mx")
    assert len(beat.action) == 4_000


def test_an_exception_is_described_without_the_notes_of_pipework() -> None:
    error = ValueError("no")
    error.add_note("of the table")
    error.add_note("pipework: stage 1, micro-batch 0, action F")
    assert describe_exception(error) == "ValueError: no\nof the table"


def test_of_the_last_calls_the_kinds_are_known() -> None:
    call = Call()
    for _ in range(12):
        call = call.begun("training step").ended()
    assert [call.kind(number) for number in (4, 5, 12, 13)] == [None, "training step", "training step", None]
    assert (call.text(), call.begun("evaluation").text()) == ("call 12 (training step)", "call 13 (evaluation)")
