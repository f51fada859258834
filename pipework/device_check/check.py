"""Checks devices and the links between them, for a given time."""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import TYPE_CHECKING

import torch

from pipework.device_check.cases import first_cases, further_cases
from pipework.device_check.differences import TOLERANCE, TOLERANCE_AUTOCAST, difference
from pipework.device_check.findings import CheckedPlace, FailedCase, Findings
from pipework.device_check.provoke import LongKernels
from pipework.device_check.speed import measure
from pipework.device_check.training import train_pipe, train_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pipework.device_check.cases import Case


def check_devices(
    devices: Sequence[torch.device], seconds: float = 50.0, progress: Callable[[str], None] = lambda text: None
) -> Findings:
    """Compares pipes with the plain model on some devices, and across each ordered pair of them.

    The first cases of every device and link are always run. Then further ones are drawn until the time is up.

    Args:
        devices: each once.
        seconds: after which no further case begins.
        progress: called with what is being checked now.

    Returns:
        What was found; also after a KeyboardInterrupt, which ends the check.

    Example:
        >>> findings = check_devices([torch.device("cpu")], seconds=0)
        >>> [(place.name, place.verdict, place.cases) for place in findings.places]
        [('cpu', 'ok', 6)]
    """
    pairs = [(device, device) for device in devices]
    pairs += [(a, b) for a in devices for b in devices if a != b]
    findings = Findings([CheckedPlace(source, destination) for source, destination in pairs])
    start = time.perf_counter()
    kernels = LongKernels()
    try:
        with _one_thread():
            for place in findings.places:
                progress(f"{place.name}: how fast copies are")
                _measure(place)
                for seed, case in enumerate(first_cases(place.source, place.destination)):
                    progress(f"{place.name}: {case}")
                    _run(place, case, seed, kernels)
            drawn = [(place, further_cases(place.source, place.destination)) for place in findings.places]
            for place, cases in itertools.cycle(drawn):
                if time.perf_counter() - start >= seconds:
                    break
                case = next(cases)
                progress(f"{place.name}: {case}")
                _run(place, case, place.cases, kernels)
    except KeyboardInterrupt:
        findings.interrupted = True
    findings.seconds = time.perf_counter() - start
    return findings


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One intra-op thread: sums on the CPU depend on their number, and each worker has a share of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _measure(place: CheckedPlace) -> None:
    try:
        place.speed = measure(place.source, place.destination)
    except Exception as error:
        place.failures.append(FailedCase("speed of copies", 0, _text(error)))


def _run(place: CheckedPlace, case: Case, seed: int, kernels: LongKernels) -> None:
    missing = [device.type for device in case.devices if not torch.amp.is_autocast_available(device.type)]
    if case.autocast and missing:
        place.left_out = [f"autocast, which PyTorch does not have for {missing[0]}"]
        return
    try:
        kernels.prepare({*case.devices, case.batch_on})
        text = _compared(place, case, seed, kernels)
    except Exception as error:
        text = _text(error)
    place.cases += 1
    if text is not None:
        place.failures.append(FailedCase(str(case), seed, text))


def _compared(place: CheckedPlace, case: Case, seed: int, kernels: LongKernels) -> str | None:
    """What went wrong, in words."""
    plain, again = train_plain(case, seed), train_plain(case, seed)
    tolerance = 0.0
    if difference(again, plain) is not None:
        tolerance = TOLERANCE_AUTOCAST if case.autocast else TOLERANCE
        place.inexact += 1
        text = difference(again, plain, tolerance)
        if text is not None:
            return f"the plain model, without pipework, differs from itself: {text}"
    return difference(train_pipe(case, seed, kernels), plain, tolerance)


def _text(error: BaseException) -> str:
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
