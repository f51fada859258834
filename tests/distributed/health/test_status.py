"""Heartbeats and failures as JSON, and calls as text."""

import json
from dataclasses import asdict
from typing import Any

import pytest

from pipework.distributed.health.status import KINDS, Beat, Call, PeerFailure, describe_exception, read_beat, write_beat

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


WRONG_FAILURES = ({"kind": "other"}, {"rank": 0.5}, {"text": None}, {"where": 1}, {"more": 1})


def test_what_no_rank_writes_is_ignored() -> None:
    written = write_beat(BEAT)
    for values in (
        *({"number": "1"}, {"call": None}, {"action": 3}, {"pid": "1"}, {"host": []}, {"place": []}, {"messages": [3]}),
        *({"failure": {**FAILURE, **wrong}} for wrong in WRONG_FAILURES),
        {"more": 1},
    ):
        assert read_beat(changed(written, **values)) is None, values
    assert read_beat(written.encode() + b" " * 500_000) is None


def test_texts_have_no_control_characters() -> None:
    beat = read_beat(changed(write_beat(BEAT), action="\x1b[31mx"))
    assert beat is not None
    assert beat.action == "?[31mx"


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
