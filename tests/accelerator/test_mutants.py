"""Each wait, record, switch and seed of the runtime is needed: without it, the detector or values show a defect."""

import contextlib
import threading
import time
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from pipework.runtime.random import kernels
from pipework.runtime.random.kernels import DeviceGenerator
from tests.accelerator import simulated
from tests.accelerator.mutants import Mutant, mutants
from tests.accelerator.scenarios import SCENARIOS, TIMED, cpu_copies

pytestmark = pytest.mark.gpu

SEEDS = (1, 2, 3)


def outcome(name: str) -> list[Tensor]:
    torch.manual_seed(7)
    return cpu_copies({**SCENARIOS, **TIMED}[name]())


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Tensor]]:
    """What the scenarios give if nothing is delayed and nothing is missing."""
    simulated.configure(races=0, poison=0)
    return {name: outcome(name) for name in (*SCENARIOS, *TIMED)}


def defect(name: str, seed: int, expected: list[Tensor], **settings: int) -> str | None:
    """How a scenario shows that something is missing; None: it does not."""
    simulated.configure(delay_probability=0.4, delay_us=1500, seed=seed, **settings)
    try:
        actual = outcome(name)
        simulated.synchronize_all()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        with contextlib.suppress(RuntimeError):  # what still runs after an error is reported now
            simulated.synchronize_all()
        found = [*simulated.races(), *simulated.poison_reads()]
    if found:
        return found[0].splitlines()[0]
    same = [torch.equal(one, other) for one, other in zip(actual, expected, strict=True)]
    return None if all(same) else f"{same.count(False)} of {len(same)} values are wrong"


def defects(
    expected: dict[str, list[Tensor]], seeds: Iterable[int] = SEEDS, order: Iterable[str] = SCENARIOS, **settings: int
) -> dict[str, str]:
    """Runs the scenarios until one shows a defect."""
    for seed in seeds:
        for name in order:
            found = defect(name, seed, expected[name], **settings)
            if found:
                return {name: found}
    return {}


@pytest.mark.parametrize("poison", [1, 2])
def test_nothing_is_missing(poison: int, expected: dict[str, list[Tensor]]) -> None:
    assert defects(expected, poison=poison) == {}


def test_recorded_times_are_in_order(expected: dict[str, list[Tensor]]) -> None:
    assert all(all(expected[name][0]) for name in TIMED)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4, 64))
def test_nothing_is_missing_with_other_delays(seed: int, expected: dict[str, list[Tensor]]) -> None:
    assert defects(expected, [seed], poison=1 + seed % 2) == {}


@pytest.fixture(scope="module")
def order() -> list[str]:
    """The scenario that has caught the last mutant comes first, as it often catches its neighbour, too."""
    return [*SCENARIOS]


@pytest.mark.parametrize("mutant", mutants(), ids=str)
def test_each_is_caught(
    mutant: Mutant, expected: dict[str, list[Tensor]], order: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant.apply(monkeypatch)
    if "Clock" in mutant.function:
        assert any(defect(name, 1, expected[name]) for name in TIMED)
    else:
        found = defects(expected, order=order)
        assert found
        order.sort(key=lambda name: name not in found)


def test_a_generator_for_each_thread_is_caught(
    expected: dict[str, list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, put, made = "two threads, not held", DeviceGenerator.set, dict[tuple[int, torch.device], DeviceGenerator]()

    def put_slowly(self: DeviceGenerator, state: tuple[int, ...]) -> None:
        put(self, state)
        time.sleep(0.002)  # another thread may draw meanwhile, if it need not wait for this one

    def of_thread(place: torch.device) -> DeviceGenerator:
        return made.setdefault((threading.get_ident(), place), DeviceGenerator(place))

    monkeypatch.setattr(DeviceGenerator, "set", put_slowly)
    assert defect(name, 1, expected[name]) is None
    monkeypatch.setattr(kernels, "device_generator", of_thread)
    assert defect(name, 1, expected[name])
