"""examples/two_gpus.py prints what docs/two_gpus.md shows."""

import re
from pathlib import Path

import pytest

from tests.programs import RunPython

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "two_gpus.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_the_bytes_of_the_page(run_python: RunPython) -> None:
    ran = run_python([str(ROOT / "examples" / "two_gpus.py"), "1B", "master", "always"], timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert re.search(r"^1B master always: .*$", PAGE, re.MULTILINE)[0] == ran.stdout.splitlines()[-1]
    rows = [line for line in PAGE.splitlines() if not line.startswith("step ")]
    assert next(line for line in ran.stdout.splitlines() if line.startswith("      ")) in rows
