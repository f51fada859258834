"""README.md: the picture shows the schedule of the example above it, and the table has the newest measurement."""

import json
import re
import runpy
import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import middle_half

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BASELINE = "un-pipelined, one core, micro-batch by micro-batch"
MEASURED = {
    "pipework, interleaved 1F1B": "pipework interleaved-1f1b",
    "torch.distributed.pipelining, interleaved 1F1B, two processes": "torch.distributed.pipelining interleaved-1f1b",
    "un-pipelined, both cores, the whole batch at once": "un-pipelined, all cores, the whole batch at once",
    "pipework, 1F1B": "pipework 1f1b",
    "torch.distributed.pipelining, 1F1B, two processes": "torch.distributed.pipelining 1f1b",
    "pipework, GPipe, loss outside": "pipework gpipe, loss outside",
    "torch.distributed.pipelining, GPipe, two processes": "torch.distributed.pipelining gpipe",
    "torchgpipe 0.0.7": "torchgpipe 0.0.7",
}


def test_the_picture_shows_the_schedule_of_the_first_example() -> None:
    example = README.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    script = runpy.run_path(str(ROOT / "docs" / "images" / "draw.py"))
    assert script["first_schedule"]() == names["pipe"].schedule()
    assert "](docs/images/first_example.svg)" in README.partition("```python\n")[2].partition("```python\n")[0]


def test_the_table_has_the_newest_measurement() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("*-two_stage_speed.json"))
    seconds = json.loads(newest.read_text(encoding="utf-8"))["seconds"]
    rows = re.findall(r"^\| \**([^|*]+?)\** \| \**([\d.]+)\** \| (\d\S* to \S+) \|$", README, re.MULTILINE)
    assert {name for name, _, _ in rows} == {*MEASURED}
    for shown, median, middle in rows:
        ratios = [each / base for each, base in zip(seconds[MEASURED[shown]], seconds[BASELINE], strict=True)]
        assert (median, middle) == (f"{statistics.median(ratios):.2f}", middle_half(ratios, 2)), shown
