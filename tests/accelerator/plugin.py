"""A pytest plugin that makes the simulated accelerator PyTorch's: `pytest -p tests.accelerator.plugin -m gpu`.

A test fails if during it streams raced, or if a kernel has read memory that was freed or never written. The environment
variable SIMULATED changes the settings, such as `SIMULATED="delay_probability=0.3,delay_us=2000"`.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.accelerator import simulated

SHOWN = 2  # reports of one test
# Tests of how fast a real device is.
SPEED = {"tests/balance/test_by_time.py::test_a_cpu_beside_an_accelerator_gets_fewer_layers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="the simulated accelerator is no faster than the CPU")
    for item in items:
        if item.nodeid in SPEED:
            item.add_marker(skip)


def settings_from(text: str) -> dict[str, Any]:
    """The keyword arguments of `simulated.configure` in a text such as "races=2,delay_us=100"."""
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name.strip(): float(value) if "." in value else int(value) for name, value in pairs}


@pytest.fixture(autouse=True)
def orderly_streams() -> Iterator[None]:
    """Begins a test with the settings of the run and without reports, and looks at the reports at its end."""
    simulated.configure(**settings_from(os.environ.get("SIMULATED", "delay_probability=0.05,delay_us=500")))
    simulated.races()
    simulated.poison_reads()
    yield
    simulated.synchronize_all()
    for what, reports in (("races", simulated.races()), ("reads of poison", simulated.poison_reads())):
        if reports:
            pytest.fail(f"{len(reports)} {what}, the first ones:\n" + "\n".join(reports[:SHOWN]), pytrace=False)


def pytest_report_header() -> str:
    return f"simulated accelerator: {os.environ.get('SIMULATED', 'default settings')}"
