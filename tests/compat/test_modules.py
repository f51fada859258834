"""The submodules without files behave like files."""

import importlib
import importlib.util
import pickle
import subprocess
import sys
from types import ModuleType

import pytest

from pipework.compat.modules import REEXPORTS, empty_module, register

MODULES = [(package, name) for package, submodules in REEXPORTS.items() for name in submodules]


@pytest.mark.parametrize(("package", "name"), MODULES, ids=lambda part: part)
def test_each_has_its_names_from_their_sources(package: str, name: str) -> None:
    module = importlib.import_module(f"{package}.{name}")
    sources = REEXPORTS[package][name]
    assert module.__all__ == sorted(each for names in sources.values() for each in names)
    for source, names in sources.items():
        assert all(getattr(module, each) is getattr(importlib.import_module(source), each) for each in names)
    assert importlib.util.find_spec(module.__name__).name == module.__name__


@pytest.mark.parametrize(
    "line",
    [
        "import pipework.compat.torchgpipe.skip.skippable",
        "from pipework.compat.fairscale.nn.pipe.balance import balance_by_time",
        "from pipework.compat.sync.skip import *; skippable, Namespace",
        "from pipework.compat.torchgpipe import GPipe, balance; balance.blockpartition.solve",
    ],
)
@pytest.mark.thorough
def test_each_kind_of_import_line_works_first(line: str) -> None:
    subprocess.run([sys.executable, "-c", line], check=True)


@pytest.mark.parametrize("name", ["torchgpipe.nothing", "torchgpipe.skip.nothing", "sync.balance"])
def test_other_names_are_missing(name: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=f"No module named 'pipework.compat.{name}'"):
        importlib.import_module(f"pipework.compat.{name}")


def test_classes_can_be_pickled() -> None:
    skip = importlib.import_module("pipework.compat.torchgpipe.skip")
    namespace = skip.Namespace()
    assert pickle.loads(pickle.dumps(namespace)) == namespace


def test_register_makes_the_packages_above(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    module = empty_module("no_such.old.library", is_package=False)
    register("no_such.old.library", module)
    assert importlib.import_module("no_such.old").library is module


def test_a_function_is_not_replaced_by_a_module_of_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    package = ModuleType("no_such")
    package.child = print
    sys.modules["no_such"] = package
    register("no_such.child", ModuleType("no_such.child"))
    assert package.child is print
