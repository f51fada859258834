"""examples/silent_errors.py: its table is whole, and pipework is right in every row, which can be seen if it is not."""

import math
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch

from tests.programs import RunPython

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed"),
    pytest.mark.timeout(400),
]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "silent_errors.py"
PAGE = ROOT / "docs" / "silent_errors.md"
OF_THE_PAGE = "2.13."  # the version of PyTorch that it was measured with
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


class Row(NamedTuple):
    name: str
    truth: str
    theirs: str
    ours: str


def rows_of(script: ModuleType, printed: str) -> list[list[Row]]:
    """The rows of each case, which are between its name and what is said about it."""
    lines, cases = printed.splitlines(), []
    widths = [len(script.line("x", "x", "x", "x").split("x")[n]) + 1 for n in (1, 2, 3)]
    first, second, third = widths[0], sum(widths[:2]), sum(widths)
    for number, case in enumerate(script.CASES, 1):
        begin = lines.index(f"{number:2} {case.__name__.replace('_', ' ')}") + 1
        end = lines.index("   " + case.__doc__.splitlines()[0])
        columns = [(row[:first], row[first:second], row[second:third], row[third:]) for row in lines[begin:end]]
        cases.append([Row(*(column.strip() for column in each)) for each in columns])
    return cases


def check(script: ModuleType, ended: subprocess.CompletedProcess[str]) -> None:
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "native code" not in ended.stderr  # each case makes a pipe, and leaves its handlers to the next
    cases = rows_of(script, ended.stdout)
    assert len(cases) == 10
    for case in cases:
        assert case
        for row in case:
            assert float(row.truth) == pytest.approx(float(row.ours)), row
    wrong = sum(any(row.theirs.endswith("WRONG") for row in case) for case in cases)
    assert f"{wrong} of 10 cases are wrong with torch.distributed.pipelining." in ended.stdout
    if torch.__version__.startswith(OF_THE_PAGE):  # later ones may have mended some
        assert wrong == 10
        check_page(cases)


def check_page(cases: list[list[Row]]) -> None:
    """The documentation shows the same table."""
    page = PAGE.read_text(encoding="utf-8")
    assert f"PyTorch {OF_THE_PAGE}" in page
    lines = [line.strip("|").split("|")[1:] for line in page.splitlines() if line.startswith("|")][2:]
    shown = [Row(*(column.strip() for column in line)) for line in lines]
    printed = [row for case in cases for row in case]
    assert [row.name for row in shown] == [row.name for row in printed]
    for one, other in zip(shown, printed, strict=True):
        assert alike(one.truth, other.truth), one
        assert alike(one.ours, other.ours), one
        theirs = f"{one.theirs.removeprefix('**').removesuffix('**')}  WRONG"
        assert alike(theirs, other.theirs) or "variance" in one.name, one  # that one is never the same


def alike(one: str, other: str) -> bool:
    """Whether texts are equal, but for the last digits of numbers."""
    number = re.compile(r"-?\d+(?:\.\d+)?")
    pairs = zip(map(float, number.findall(one)), map(float, number.findall(other)), strict=False)
    return number.sub("0", one) == number.sub("0", other) and all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param([], id="by itself", marks=pytest.mark.thorough),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.slow),
    ],
)
def test_pipework_is_right_in_every_row(
    run_python: RunPython, script: ModuleType, environment: dict[str, str], command: list[str]
) -> None:
    surroundings = {**environment, "PYTHONWARNINGS": "default"}  # of what PyTorch warns is not for us to say
    check(script, run_python([*command, SCRIPT], env=surroundings, timeout=300))


def test_a_wrong_figure_is_seen(script: ModuleType) -> None:
    assert script.shown(1.0, 1.0 + 1e-9) == "1"
    assert script.shown(1.001, 1.0) == "1.001  WRONG"
    assert script.shown("SIGABRT", 1.0) == "SIGABRT  WRONG"
    assert script.shown(float("nan"), 0.0) == "nan  WRONG"
    assert script.shown(1e-17, 0.0) == "1e-17"

    def fails() -> list[float]:
        raise KeyError("name")

    assert script.attempted(fails, 2) == ["KeyError", "KeyError"]
