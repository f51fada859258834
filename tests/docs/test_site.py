"""The site is complete, its pictures are those that the script draws, and it builds without a warning."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import pipework
import pipework.compat

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


COMPAT = [*pipework.compat.__all__, "sync.Pipe", "torchgpipe.GPipe", "fairscale.nn.Pipe"]


def test_the_reference_has_every_public_name() -> None:
    reference = (DOCS / "reference.md").read_text(encoding="utf-8")
    found = re.findall(r"^\.\. auto\w+:: pipework\.(\S+)$", reference, re.MULTILINE)
    assert {*pipework.__all__, *(f"compat.{name}" for name in COMPAT)} <= {*found}


DRAWN = ["graph_cut", "skip", "checkpoint", "split", "schedules", "first_example", "memory", "planning", "offload"]


@pytest.mark.parametrize("draw", DRAWN)
def test_pictures_are_as_they_are_drawn(draw: str, tmp_path: Path) -> None:
    script = runpy.run_path(str(DOCS / "images" / "draw.py"))
    script[draw].__globals__["HERE"] = tmp_path
    script[draw]()
    drawn = list(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        again = "run docs/images/draw.py and look at the result"
        assert picture.read_bytes() == (DOCS / "images" / picture.name).read_bytes(), again


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx", reason="the documentation's own packages are not installed; `make docs` has them")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "doctrees")]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    ran = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "html")], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    reference = (tmp_path / "html" / "reference.html").read_text(encoding="utf-8")
    assert "pipework.Pipe" in reference
    assert "mappingproxy" not in reference  # a signature says SCHEDULES
