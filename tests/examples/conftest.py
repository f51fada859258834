"""What the tests of the examples share: scripts as modules, and the environment of scripts as processes."""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def ctrl_c_as_before() -> Iterator[None]:
    """The scripts, which are made to be processes of their own, may leave Ctrl-C and SIGTERM as they like it."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def load() -> Callable[[str], ModuleType]:
    """Imports an example. It can import those that were loaded before; nobody else comes across them."""
    loaded: dict[str, ModuleType] = {}

    def load(name: str) -> ModuleType:
        if name not in loaded:
            spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            loaded[name] = importlib.util.module_from_spec(spec)
            with pytest.MonkeyPatch.context() as patch:
                for each, module in loaded.items():
                    patch.setitem(sys.modules, each, module)
                spec.loader.exec_module(loaded[name])
        return loaded[name]

    return load


@pytest.fixture(scope="module")
def script(load: Callable[[str], ModuleType], request: pytest.FixtureRequest) -> ModuleType:
    """The example of the test's file, `test_unet.py` for `unet.py`."""
    return load(request.path.stem.removeprefix("test_"))


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """For processes: this checkout's library, one thread each, every warning an error."""
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
