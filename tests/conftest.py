"""What every test relies on: one intra-op thread, a fixed seed, accelerators only where there are some."""

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` on a machine without an accelerator."""
    if torch.accelerator.is_available():
        return
    skip = pytest.mark.skip(reason="needs an accelerator, and torch.accelerator.is_available() is False")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Bitwise comparisons need a fixed number of intra-op threads, because sums depend on how work is divided."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def own_workers() -> Callable[[], list[threading.Thread]]:
    """Lists the workers' threads that were started since the test began and are still there."""
    gc.collect()
    earlier = set(threading.enumerate())

    def started() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name.startswith("pipework worker") and t not in earlier]

    return started


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test starts from the same random state."""
    torch.manual_seed(0)
