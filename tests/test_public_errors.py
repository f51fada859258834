"""Public exceptions: a traceback shows the name by which a program imports and catches them."""

import doctest
import pickle
import subprocess
import sys
import traceback
from importlib import import_module

import pytest

PACKAGES = ["pipework", "pipework.saving", "pipework.schedule", "pipework.testing"]
ERRORS = {
    f"{package}.{name}": value
    for package in PACKAGES
    for name in import_module(package).__all__
    if isinstance(value := getattr(import_module(package), name), type) and issubclass(value, BaseException)
}


def test_all_of_them_are_found() -> None:
    assert list(ERRORS) == [
        "pipework.PipeWarning",
        "pipework.PipelineError",
        "pipework.saving.DamagedError",
        "pipework.saving.UnfitError",
        "pipework.schedule.ScheduleError",
    ]


@pytest.mark.parametrize("name", ERRORS)
def test_a_traceback_shows_the_public_name(name: str) -> None:
    assert traceback.format_exception_only(ERRORS[name]("no")) == [f"{name}: no\n"]


@pytest.mark.parametrize("name", ERRORS)
def test_it_can_be_pickled(name: str) -> None:
    copy = pickle.loads(pickle.dumps(ERRORS[name]("no")))
    assert type(copy) is ERRORS[name]
    assert str(copy) == "no"


def test_a_pickle_is_read_where_the_name_was_never_used() -> None:
    data = pickle.dumps(ERRORS["pipework.PipelineError"]("no", rank=3))
    code = f"import pickle; print(pickle.loads({data!r}).rank)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "3\n"


@pytest.mark.parametrize("name", ERRORS)
def test_its_examples_run(name: str) -> None:
    """Doctest looks for a class only in the module that it names, and does not see names that are imported later."""
    names = dict(vars(import_module(name.rpartition(".")[0])))
    for example in doctest.DocTestFinder().find(ERRORS[name], name, globs=names):
        assert doctest.DocTestRunner(verbose=False).run(example).failed == 0
