"""Tests mirror the source: `tests/model/loss/test_settings.py` is of `pipework/model/loss/settings.py`.

More tests of one file may have more words in their name: `test_validate_randomly.py` is of `validate.py`.
"""

from pathlib import Path

import pipework

TESTS = Path(__file__).parent
PACKAGE = Path(pipework.__file__).parent

# Folders of tests that span the whole library, or are of what is outside the package.
SPANNING = {
    "accelerator", "benchmarks", "compat/differential", "ddp", "distributed/together", "docs", "examples", "exactness",
    "faults", "gpu",
}  # fmt: skip
# Tests of several source files of their folder, or of all its subfolders, or of a stand-in that other tests run with.
OF_SEVERAL = {
    ".": {"gpu", "gradcheck", "imports", "mirror", "public_errors", "tiers"},
    "autograd/weight_split": {"randomly"},
    "compat": {"differences"},
    "integrations": {"accelerate", "breadth", "lightning", "trl"},
    "planning": {"random_requests"},
    "runtime/graphs": {"recorded"},
    "saving": {
        "compiled",
        "crashes",
        "damage",
        "format_on_disk",
        "meta_device",
        "replicas",
        "round_trips",
        "several_ranks",
    },
    "schedule/generators": {"bubbles", "named_schedules"},
}
FILES = sorted(
    path.relative_to(TESTS)
    for path in TESTS.rglob("test_*.py")
    if not any(path.is_relative_to(TESTS / folder) for folder in SPANNING)
)


def sources(folder: str) -> set[str]:
    """The names of the modules of a folder of the package; `main` is `__main__.py`."""
    return {path.stem.strip("_") for path in (PACKAGE / folder).iterdir() if path.suffix == ".py" or path.is_dir()}


def source_of(path: Path) -> str | None:
    """The name of the module that a file of tests is named after."""
    words = path.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:count]) for count in range(len(words), 0, -1)]
    folder = PACKAGE / path.parent
    return next((name for name in names if folder.is_dir() and name in sources(str(path.parent))), None)


def test_each_file_of_tests_has_a_source_file() -> None:
    of_one = [path for path in FILES if path.stem.removeprefix("test_") not in OF_SEVERAL.get(str(path.parent), ())]
    assert [path for path in of_one if source_of(path) is None] == [], "named after no file in this folder of pipework/"


def test_the_exceptions_are_needed() -> None:
    listed = {Path(folder, f"test_{name}.py") for folder, names in OF_SEVERAL.items() for name in names}
    assert listed <= {*FILES}
    assert [path for path in listed if source_of(path) is not None] == []
    assert [folder for folder in SPANNING if not (TESTS / folder).is_dir() or (PACKAGE / folder).is_dir()] == []
