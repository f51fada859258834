"""`make test-gpu`: no check goes on after the time that all have together."""

import time
from pathlib import Path

import pytest

from tests.gpu.run import Check, run

CHECK = Check("slow", ["-c", "import time; print(1, flush=True); time.sleep(60)"], 60.0, lambda output, report: (1, 0))


@pytest.mark.parametrize(
    ("left", "output"), [(-1.0, "not begun: the checks before it took 300 s"), (0.5, "ended after 0.5 s")]
)
def test_a_check_has_the_time_that_is_left(tmp_path: Path, left: float, output: str) -> None:
    found = run(CHECK, tmp_path / "report.xml", time.perf_counter() + left)
    assert (found.passed, found.failed) == (0, 1)
    assert found.output.endswith(output)
    assert found.seconds < 30.0
