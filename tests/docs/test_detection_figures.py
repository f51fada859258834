"""What the documentation says of how soon failures are found is what was measured last, and what the code has."""

import inspect
import json
import re
import statistics
from pathlib import Path

import pytest

import pipework
from pipework.distributed.health import process_exit
from pipework.distributed.health.failure_detector import DetectionTimes

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
FAULTS = {
    "is killed in a forward": "killed in a forward",
    "is killed in a backward": "killed in a backward",
    "is killed between two steps": "killed between two steps",
    "raises an exception": "an exception",
    "is stopped (SIGSTOP)": "stopped (SIGSTOP)",
    "keeps Python's lock": "keeps the GIL",
    "is in an endless loop (`action_timeout=3`)": "an endless loop",
    "lives, and the store ends": "the store ends",
}


def newest() -> dict[str, list[float]]:
    path = max((ROOT / "benchmarks" / "results").glob("*-detection.json"))
    result = json.loads(path.read_text(encoding="utf-8"))
    assert f"with `detect={result['detect']:.0f}`;\neach fault struck {result['rounds']} times" in PAGE
    return {name: list(each) for name, each in result["seconds"].items()}


def test_the_table_is_of_the_newest_measurement() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    measured = newest()
    assert [name for name, _, _ in rows] == list(FAULTS)
    assert set(FAULTS.values()) == measured.keys()
    for name, p50, p99 in rows:
        seconds = measured[FAULTS[name]]
        assert (p50, p99) == (f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}"), name


@pytest.mark.parametrize(
    ("name", "shown"), [("detect", "10 seconds"), ("action_timeout", "none"), ("timeout", "300 seconds")]
)
def test_what_is_taken_if_nothing_is_said(name: str, shown: str) -> None:
    default = inspect.signature(pipework.init).parameters[name].default
    assert f"* `{name}` ({shown})" in PAGE
    assert shown == ("none" if default is None else f"{default:.0f} seconds")


def test_other_times() -> None:
    defaults = DetectionTimes()
    assert (defaults.beat, defaults.poll) == (0.5, 0.1)
    assert "heartbeat every half second, and report a failure within a tenth of a second" in PAGE
    assert process_exit.GRACE == 5.0
    assert inspect.signature(pipework.init).parameters["grace"].default == 5.0
    assert "return within 5 seconds after another one has failed (`pipework.init(grace=5)`)" in PAGE
