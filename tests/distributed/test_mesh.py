"""What `init` refuses before any process is waited for."""

from typing import Any

import pytest

import pipework


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dp": 0}, "dp is the number of replicas, a positive integer: got 0"),
        ({"dp": True}, "got True"),
        ({"dp": 2.0}, "got 2.0"),
        ({"detect": 0.4}, "detect must be at least 1 second"),
        ({"detect": float("nan")}, "detect must be at least 1 second"),
        ({"action_timeout": -1}, "action_timeout must be a positive number of seconds, or None: got -1"),
        ({"timeout": 0}, "timeout must be a positive number"),
        ({"grace": -1}, "grace must be a number of seconds, 0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_without_a_launcher_too(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pipework.init(**arguments)
