"""Imports point one way: a room may use the rooms named here, and what is only for type checkers does not count."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pipework

PACKAGE = Path(pipework.__file__).parent
CONCEPTS = {
    "allotment", "balance", "batchnorm", "checkpoint", "layers", "loss", "materialize", "microbatch", "partition",
    "sequential", "skip",
}  # fmt: skip
BELOW_PIPE = {"schedule", "timeline", "runtime", "processes", "summary", "plan", "contract", "predict"} | CONCEPTS
MAY_IMPORT = {
    "schedule": set(),
    "timeline": {"schedule"},
    "runtime": {"schedule"},
    "processes": {"runtime", "schedule"},
    **dict.fromkeys(CONCEPTS, {"runtime"} | CONCEPTS),
    "summary": {"schedule"},
    "plan": {"balance", "partition", "runtime", "schedule"},
    "contract": {"schedule", "plan", "__init__"},
    "predict": {"balance", "runtime", "schedule", "summary"},
    "pipe": BELOW_PIPE,
    "saving": set(),  # what it needs of a pipe are its partitions
    "__init__": BELOW_PIPE | {"pipe", "saving"},
}
# For the rooms that no other may import.
EVERYTHING = BELOW_PIPE | {"pipe", "saving", "compat", "testing", "cli", "__init__"}


def imported(node: ast.AST) -> Iterator[str]:
    """The modules that are imported at run time anywhere below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            if child.module == "pipework":
                yield from (f"pipework.{alias.name}" for alias in child.names)
            else:
                yield child.module or ""
        yield from imported(child)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    names = set(imported(ast.parse(path.read_text())))
    rooms = {name.split(".")[1] for name in names if name.startswith("pipework.")}
    assert rooms <= MAY_IMPORT.get(room, EVERYTHING) | {room}
    if room == "schedule":
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"pipework"}


@pytest.mark.parametrize("module", ["pipework", "pipework.schedule"])
def test_what_needs_no_tensors_imports_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", pipework.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert name in dir(pipework)
    assert getattr(pipework, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Pip'"):
        _ = pipework.Pip
