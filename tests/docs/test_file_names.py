"""The files and folders that design.md, threads.md and CONTRIBUTING.md name are there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pipework"
PAGES = [ROOT / "docs" / "design.md", ROOT / "docs" / "threads.md", ROOT / "CONTRIBUTING.md"]
EXAMPLES = {"benchmarks/name/run.py"}
NAMED = sorted({(page, name) for page in PAGES for name in re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text())})


def is_there(name: str) -> bool:
    if name.endswith(".py"):
        return name in EXAMPLES or any(place.is_file() for place in (PACKAGE / name, ROOT / name))
    # A folder may be named relative to the one that is named before it.
    folders = [ROOT / name, *(place for place in PACKAGE.rglob("*/") if place.is_dir())]
    return any(f"{folder}/".endswith(f"/{name}") for folder in folders if folder.is_dir())


def test_they_are_there() -> None:
    assert len(NAMED) > 60
    assert [(page.name, name) for page, name in NAMED if not is_there(name)] == []


@pytest.mark.parametrize("folder", ["", "transport", "gradients", "health"])
def test_a_folder_lists_its_files(folder: str) -> None:
    init = PACKAGE / "distributed" / folder / "__init__.py"
    lines = [line.partition(":")[0] for line in init.read_text().splitlines() if line.startswith("* ")]
    listed = {name for line in lines for name in re.findall(r"`(\w+)`", line)}
    assert listed == {path.stem for path in init.parent.glob("[!_]*.py")}
