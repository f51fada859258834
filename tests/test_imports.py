"""Imports point one way: a folder may use the folders named here. Imports for type checkers do not count."""

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import pipework

PACKAGE = Path(pipework.__file__).parent
# From below to above; a folder without subfolders here has none, or does not tell them apart. All that use PyTorch may
# import torch_private, tracebacks, spot_checks and signatures.
MAY_IMPORT = {
    "schedule": {
        "schedule.generators", "schedule.passes", "schedule.analysis", "schedule.draw",
    },
    "schedule.generators": {"schedule"},
    "schedule.passes": {"schedule", "schedule.analysis"},
    "schedule.analysis": {"schedule", "schedule.passes", "schedule.draw"},
    "schedule.draw": {"schedule"},
    "timeline": {"schedule", "schedule.analysis", "schedule.draw"},
    "fsdp_private": set(),
    "torch_private": set(),
    "tracebacks": set(),
    "spot_checks": set(),
    "signatures": set(),
    "values": set(),
    "autograd": {"autograd.weight_split", "values"},
    "autograd.weight_split": set(),
    "runtime": {
        "autograd", "runtime.graphs", "runtime.random", "runtime.skips", "runtime.stage", "schedule", "schedule.draw",
        "schedule.passes", "values",
    },
    "runtime.graphs": {"autograd", "fsdp_private", "runtime", "runtime.random", "runtime.stage", "values"},
    "runtime.random": set(),
    "runtime.skips": {"autograd", "values"},
    "runtime.stage": {
        "autograd", "autograd.weight_split", "runtime", "runtime.graphs", "runtime.random", "runtime.skips", "schedule",
        "values",
    },
    "model": {"autograd", "runtime", "runtime.random", "runtime.stage", "values"},
    "model.parts": {"model", "runtime", "runtime.random", "values"},
    "model.loss": {"model", "runtime", "runtime.random", "runtime.stage", "values"},
    "planning": {"assignment.minimax", "schedule", "schedule.analysis", "schedule.draw"},
    "assignment.minimax": set(),
    "assignment": {
        "assignment.minimax", "model", "model.parts", "planning", "runtime", "runtime.random", "schedule",
        "schedule.draw", "values",
    },
    "planning.balance": {"assignment", "assignment.minimax", "model", "planning.measuring"},
    "planning.measuring": {
        "__init__", "assignment", "autograd", "autograd.weight_split", "distributed", "integrations", "model",
        "model.loss", "model.parts", "planning",
        "runtime", "runtime.skips", "runtime.stage", "saving", "schedule",
        "schedule.draw", "skip", "summary", "values",
    },
    "skip": {"model", "runtime.skips"},
    "summary": {"schedule", "schedule.draw", "values"},
    "distributed": {
        "backend", "distributed.gradients", "distributed.health", "distributed.transport", "model", "runtime",
        "runtime.random", "schedule", "timeline", "values", "__init__",
    },
    "distributed.gradients": {"distributed.transport", "model", "values"},
    "distributed.health": set(),
    "distributed.transport": {"runtime", "runtime.skips", "runtime.stage", "values"},
    "testing": {
        "autograd", "distributed", "doubts", "model", "model.parts", "runtime", "runtime.random", "runtime.skips",
        "runtime.stage", "saving", "values",
    },
    "verify": {"saving", "schedule.draw", "testing"},
    "device_check": {"pipe", "skip", "testing"},
    "backend": {"runtime"},
    "doubts": {"autograd", "model", "model.loss"},
    "settings": {"model", "model.loss", "schedule"},
    "executor": {
        "autograd", "backend", "doubts", "model", "model.loss", "planning.measuring", "runtime", "runtime.random",
        "runtime.skips", "runtime.stage", "settings", "skip",
    },
    "pipe": {
        "assignment", "backend", "distributed", "doubts", "executor", "model", "runtime.random", "runtime.stage",
        "settings", "skip", "summary", "timeline", "verify",
    },
    "integrations": {"model", "model.parts", "saving", "values"},
    "attached": {
        "assignment", "integrations", "model", "model.parts", "pipe", "planning.balance", "settings", "values",
    },
    "saving": {"__init__", "model", "values"},  # what it needs of a pipe are its partitions
    "__init__": {
        "assignment", "attached", "distributed", "distributed.health", "integrations", "model", "pipe",
        "planning", "planning.balance", "planning.measuring", "saving", "skip",
    },
}  # fmt: skip
FILES = sorted(PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The name of a file's module below the package; that of the package itself is `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for path in FILES}


def folder_of(module: str) -> str:
    """The innermost entry of the table that a module belongs to."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), parts[0])


def imported(node: ast.AST) -> Iterator[str]:
    """The names that are imported at run time anywhere below a node."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, "imports are absolute"
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        yield from imported(child)


def modules_imported(path: Path) -> set[str]:
    """The modules of this package that a file imports."""
    found = set()
    for name in imported(ast.parse(path.read_text())):
        if name == "pipework" or name.startswith("pipework."):
            inner = name.removeprefix("pipework").removeprefix(".")
            parent = inner.rpartition(".")[0]
            public = next((home for home, names in pipework._HOMES.items() if inner in names), "__init__")
            found.add(inner if inner in modules() else parent if parent in modules() else public)
    return found


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_one_way(path: Path) -> None:
    folder = folder_of(module_of(path))
    if folder in MAY_IMPORT:  # compat, cli and __main__ may import everything, and nothing else may import them
        folders = {folder_of(name) for name in modules_imported(path)}
        assert (
            folders - {folder, "fsdp_private", "torch_private", "tracebacks", "spot_checks", "signatures"}
            <= MAY_IMPORT[folder]
        )
    if folder.split(".")[0] == "schedule":
        names = set(imported(ast.parse(path.read_text())))
        allowed = sys.stdlib_module_names | {"pipework"}
        assert {name.split(".")[0] for name in names} <= allowed


def test_torch_alone_is_needed_to_import_what_is_public() -> None:
    # Imported for a model of transformers.
    own = {"integrations/transformers.py", "integrations/sketch.py", "integrations/trainer.py"}
    for path in FILES:
        if path.relative_to(PACKAGE).as_posix() in own:
            continue
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = [statement.module or ""] if isinstance(statement, ast.ImportFrom) else [
                    alias.name for alias in statement.names
                ]  # fmt: skip
                others = {name.partition(".")[0] for name in names} - sys.stdlib_module_names
                assert others <= {"torch", "pipework"}, path


def test_no_circles() -> None:
    """Imports inside of functions count, too, and public names of `pipework` as the files that define them."""
    graph = {name: modules_imported(path) - {name} for name, path in modules().items()}
    del graph["__init__"]  # finds its names when they are asked for
    list(TopologicalSorter(graph).static_order())


def test_a_pipe_loads_no_more_than_it_needs() -> None:
    code = "import json, sys; from pipework import Pipe; print(json.dumps([*sys.modules]))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    loaded = [name.removeprefix("pipework.") for name in json.loads(printed) if name.partition(".")[0] == "pipework"]
    assert len(loaded) <= 150
    others = {"planning", "saving", "cli", "integrations", "compat", "distributed", "device_check", "testing"}
    assert others.isdisjoint(name.partition(".")[0] for name in loaded)


def test_one_class_per_name() -> None:
    classes: Counter[str] = Counter()
    for path in FILES:
        if "compat" not in path.parts:  # which has the names of several libraries
            tree = ast.parse(path.read_text())
            classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")
    assert not [name for name, count in classes.items() if count > 1]


@pytest.mark.parametrize("module", ["pipework", "pipework.timeline", "pipework.planning.cuts"])
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
