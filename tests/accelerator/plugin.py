"""A pytest plugin that makes the simulated accelerator PyTorch's: `pytest -p tests.accelerator.plugin -m gpu`.

A test fails if during it streams raced, or if a kernel has read memory that was freed or never written. The environment
variable SIMULATED changes the settings, such as `SIMULATED="delay_probability=0.3,delay_us=2000"`.
"""

import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.accelerator import simulated

SHOWN = 2  # reports of one test
# Tests of how fast a real device is.
SPEED = {"tests/planning/test_balance.py::test_a_cpu_beside_an_accelerator_gets_fewer_layers"}


# Tests whose bodies run here, too, with everything on simulated devices.
BODIES = "tests/exactness/"
# Their pipes have a device for each worker. In other tests all workers share one, with streams of their own.
EVERY_MODEL = tuple(f"tests/exactness/test_{name}.py::test_every_model" for name in ("grid", "offload"))
SEVERAL = (
    *EVERY_MODEL,
    "tests/exactness/test_grid.py::test_deferred_batch_norm",
    "tests/exactness/test_random_models.py",
    "tests/exactness/test_skips.py",
)
# These are about the CPU: its autocast, its 16-bit arithmetic, Python code that kernels on other threads may run,
# conjugate and complex views, and torch.mv, which multiplies memory that nobody wrote by 0; and the stand-in for
# graphs, which knows the CPU's generators only (`tests/accelerator/test_graphs.py` has captured steps on simulated
# devices).
CPU_ONLY = (
    "tests/exactness/test_graphs.py",
    "tests/exactness/test_halves.py::test_autocast_casts_each_parameter_once_in_a_mini_batch",
    "tests/exactness/test_offload.py::test_compiled_layers",
    "tests/exactness/test_offload.py::test_saved_tensors_of_many_kinds",
    "tests/exactness/test_modes.py::test_a_mode_is_used_by_one_worker_at_a_time",
    "tests/exactness/test_values.py::test_tensors_cross_a_boundary_as_they_lie_in_memory",
    "tests/exactness/test_with_pytorch.py::test_an_overflow_inside_of_the_pipe_skips_the_step",
    "tests/exactness/test_with_pytorch.py::test_parametrized_modules",
    "tests/exactness/test_with_pytorch.py::test_small_gradients_in_float16_survive_if_the_pipe_knows_the_scaler",
)
EACH = 4  # cases of each of these tests; the others are slow


def _is_body(item: pytest.Item) -> bool:
    if not item.nodeid.startswith(BODIES) or item.nodeid.startswith(CPU_ONLY):
        return False
    # The CPU's 16-bit kernels read memory that nobody wrote: most of these models show it without a pipe.
    return not (item.nodeid.startswith(EVERY_MODEL) and item.callspec.params["dtype"] is torch.bfloat16)  # type: ignore[attr-defined]


@pytest.hookimpl(tryfirst=True)  # before pytest looks at what -m asks for
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="the simulated accelerator is no faster than the CPU")
    bodies: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.nodeid in SPEED:
            item.add_marker(skip)
        if _is_body(item) and "way" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")
            if "slow" not in item.keywords:
                bodies.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chooser = random.Random(0)
    for cases in bodies.values():
        chooser.shuffle(cases)
        for case in cases[EACH:]:
            case.add_marker("slow")


def settings_from(text: str) -> dict[str, Any]:
    """The keyword arguments of `simulated.configure` in a text such as "races=2,delay_us=100"."""
    pairs = (pair.split("=") for pair in text.split(",") if pair)
    return {name.strip(): float(value) if "." in value else int(value) for name, value in pairs}


@pytest.fixture(autouse=True)
def made_on_a_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests of exactness, tensors are made on the first device unless they say otherwise."""
    if not _is_body(request.node):
        yield
        return
    with torch.device("sim" if request.node.nodeid.startswith(SEVERAL) else "sim:0"):
        yield


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
