"""The tests of the simulated accelerator run only where it is PyTorch's accelerator: with `make test-accelerator`."""

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves the folder out in other runs; importing its files would change the whole process."""
    return None if config.pluginmanager.has_plugin("tests.accelerator.plugin") else True
