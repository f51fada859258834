"""What the documentation says of how soon failures are found is what was measured last."""

import json
import re
import statistics
from pathlib import Path

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
