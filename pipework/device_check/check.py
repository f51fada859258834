"""Checks devices and the links between them, for a given time."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from pipework.device_check.training import FIRST, autocast, cases_of, train_pipe, train_plain
from pipework.testing.comparison import MOST, Compared, allowed_for, differences, tolerance_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pipework.device_check.training import Case


@dataclass
class CheckedPlace:
    """A device, or a link between two.

    Attributes:
        source: a device.
        destination: the same for a device, another one for a link.
        cases: how many have been run.
        failures: for each case that went wrong what it was, and what differed, or the error.
        inexact: for how many cases the plain model differed from itself, so that a difference was allowed.
    """

    source: torch.device
    destination: torch.device
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    inexact: int = 0

    @property
    def name(self) -> str:
        """As it is printed."""
        return str(self.source) if self.source == self.destination else f"{self.source} -> {self.destination}"


def check_devices(
    devices: Sequence[torch.device], seconds: float = 50.0, progress: Callable[[str], None] = lambda text: None
) -> list[CheckedPlace]:
    """Compares pipes with the plain model on some devices, and across each ordered pair of them.

    The first cases of every device and link are always run. Then further ones are drawn until the time is up.

    Args:
        devices: each once.
        seconds: after which no further case begins.
        progress: called with what is being checked now.

    Example:
        >>> [(place.name, place.cases, place.failures) for place in check_devices([torch.device("cpu")], seconds=0)]
        [('cpu', 6, [])]
    """
    pairs = [*((device, device) for device in devices), *itertools.permutations(devices, 2)]
    places = [CheckedPlace(source, destination) for source, destination in pairs]
    drawn = [(each, cases_of(each.source, each.destination)) for each in places]
    first = [(place, case) for place, cases in drawn for case in itertools.islice(cases, FIRST)]
    further = ((place, next(cases)) for place, cases in itertools.cycle(drawn))
    start, threads = time.perf_counter(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)  # sums on the CPU depend on the number of threads, and each worker has a share of them
        for number, (place, case) in enumerate(itertools.chain(first, further)):
            if number >= len(first) and time.perf_counter() - start >= seconds:
                break
            progress(f"{place.name}: {case}")
            _run(place, case)
    finally:
        torch.set_num_threads(threads)
    return places


def _run(place: CheckedPlace, case: Case) -> None:
    seed = place.cases
    if not all(torch.amp.is_autocast_available(device.type) for device in case.devices):
        case = replace(case, autocast=False)
    try:
        wrong = _wrong(place, case, seed)
    except Exception as error:
        wrong = "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    place.cases += 1
    if wrong:
        place.failures.append(f"{case} (seed {seed}): {wrong}")


def _wrong(place: CheckedPlace, case: Case, seed: int) -> str:
    """What went wrong, in words; empty: nothing did."""
    plain = train_plain(case, seed)
    itself = Compared.of("results", "itself", differences(train_plain(case, seed), plain), MOST)
    allowed = 0.0
    if itself.difference:
        place.inexact += 1
        with autocast(case):
            allowed = allowed_for(itself.difference, tolerance_of(plain.values()))
    found = Compared.of("results", "the plain model", differences(train_pipe(case, seed), plain), allowed)
    for each, whose in ((itself, "the plain model, without pipework, differs from itself: "), (found, "")):
        if each.first:
            return f"{whose}{each.first}: the largest difference is {each.difference:.3g} of the largest element"
    return ""
