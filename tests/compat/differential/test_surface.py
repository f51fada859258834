"""Every public name of the originals is at the same place here, with the same parameters, or has a reason not to be."""

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import nn

# For pipelines of several processes, which the adapters do not have.
OF_PROCESSES = {"async_pipe", "async_pipeline", "async_schedule", "messages", "rpc", "types"}
NAMES_OF_PROCESSES = {"AsyncPipe", "LazyModule", "PipeRPCWrapper"}
# How the originals work inside: nothing in them is meant for users.
INTERNAL = {
    "balance.profile",
    "copy",
    "dependency",
    "microbatch",
    "phony",
    "pipeline",
    "skip.layout",
    "skip.portal",
    "skip.tracker",
    "stream",
    "worker",
}
VERSION = {"__version__"}  # a module in torchgpipe; here a string alone, as it is after the import of torchgpipe
FUNCTIONS_WITHOUT_A_PIPE = {("checkpoint", "checkpoint")}

Place = tuple[str, str]  # a module within the package, and a name in it


def public(library: Any) -> dict[str, list[str]]:
    """All modules of the package, with what they list as public; if they list nothing, with what comes from it."""
    package = library.module()
    prefix = f"{library.package}."
    names = {info.name for info in pkgutil.walk_packages(package.__path__, prefix)}
    names |= {name for name in sys.modules if name.startswith(prefix)}  # those of the adapters have no files
    modules = {name.removeprefix(prefix): importlib.import_module(name) for name in names}
    return {"": names_in(package)} | {place: names_in(module) for place, module in modules.items()}


def names_in(module: ModuleType) -> list[str]:
    package = module.__name__.partition(".")[0]
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", "").startswith(package)]
    return sorted(getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")])


def parameters(library: Any, places: list[Place]) -> dict[str, list[tuple[str, str, str]]]:
    """The parameters of functions, of classes and of their methods: name, kind and default of each."""
    found = {}
    for place, name in places:
        value = getattr(library.module(place), name)
        found[f"{place}.{name}"] = described(value)
        for method in own_methods(value):
            found[f"{place}.{name}.{method}"] = described(getattr(value, method))
    return found


def described(function: Callable[..., Any]) -> list[tuple[str, str, str]]:
    given = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.kind.name, str(parameter.default)) for parameter in given]


def own_methods(value: Any) -> list[str]:
    """The methods of a class that it does not have from torch."""
    if not inspect.isclass(value):
        return []
    own = [vars(base) for base in value.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    names = {name for attributes in own for name, member in attributes.items() if callable(getattr(value, name, None))}
    return sorted(name for name in names if not name.startswith("_") or name in ("__len__", "__iter__", "__getitem__"))


def kinds(library: Any, places: list[Place]) -> list[str]:
    values = [getattr(library.module(place), name) for place, name in places]
    return ["class" if inspect.isclass(value) else type(value).__name__ for value in values]


def shown(library: Any) -> list[Any]:
    """Attributes of a pipe, and how a pipe and a skippable layer are printed."""
    pipe = library.pipe(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), [1, 1], 2)
    names = ("balance", "checkpoint", "chunks", "devices", "partitions", "training")
    attributes = [(type(getattr(pipe, name)).__name__, str(getattr(pipe, name))) for name in names]
    return [*attributes, repr(pipe), repr(library.module("skip").skippable(stash=["a"])(nn.Identity)())]


@pytest.fixture
def originals(ask: Callable[..., Any]) -> dict[str, list[str]]:
    found = ask(public)
    assert isinstance(found, dict), found
    return found


@pytest.fixture
def places(originals: dict[str, list[str]]) -> list[Place]:
    """What should be here, too."""
    left_out = OF_PROCESSES | INTERNAL | VERSION
    modules = {place: names for place, names in originals.items() if place not in left_out}
    found = [(place, name) for place, names in modules.items() for name in names if name not in NAMES_OF_PROCESSES]
    return [each for each in found if each not in FUNCTIONS_WITHOUT_A_PIPE]


def test_every_public_name_is_at_its_place(adapter: Any, places: list[Place]) -> None:
    assert len(places) >= 15
    assert [name for place, name in places if not hasattr(adapter.module(place), name)] == []


def test_what_is_left_out_was_there(name: str, originals: dict[str, list[str]], adapter: Any) -> None:
    here = public(adapter)
    left_out = INTERNAL | (VERSION if name == "torchgpipe" else OF_PROCESSES)
    assert set(originals) - set(here) == left_out
    assert set(originals[""]) - set(here[""]) == (NAMES_OF_PROCESSES & set(originals[""]))


def test_public_things_are_of_the_same_kind(ask: Callable[..., Any], adapter: Any, places: list[Place]) -> None:
    assert kinds(adapter, places) == ask(kinds, places)


def test_parameters_are_the_same(ask: Callable[..., Any], adapter: Any, places: list[Place]) -> None:
    """Here may be more, but only after a star and with a default; the default of `device` differs."""
    theirs, mine = ask(parameters, places), parameters(adapter, places)
    assert len(theirs) >= 25
    for name, expected in theirs.items():
        count = len(expected)
        there, here = ([each[: 2 if each[0] == "device" else 3] for each in side] for side in (expected, mine[name]))
        assert here[:count] == there, name
        assert all(kind == "KEYWORD_ONLY" and "_empty" not in default for _, kind, default in mine[name][count:]), name


def test_a_pipe_and_a_skippable_layer_look_the_same(both: Callable[..., tuple[Any, Any]]) -> None:
    original, mine = both(shown)
    assert mine == original


def test_the_version_is_that_of_the_original(ask: Callable[..., Any], name: str) -> None:
    assert importlib.import_module(f"pipework.compat.{name}").__version__ == ask(version)


def version(library: Any) -> str:
    return importlib.import_module(library.name).__version__
