"""Compares what a pipe has computed with what the plain model has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from pipework.device_check.training import Values

# Relative to the largest element of a tensor, where the plain model differs from itself.
TOLERANCE: Final = 1e-4
TOLERANCE_AUTOCAST: Final = 5e-2


def difference(actual: Values, expected: Values, tolerance: float = 0.0) -> str | None:
    """What differs, in words; None: nothing does.

    Args:
        actual: of the pipe.
        expected: of the plain model.
        tolerance: relative to the largest element of each tensor; 0: bitwise.

    Example:
        >>> difference([{"loss": torch.tensor(1.0)}], [{"loss": torch.tensor(2.0)}])
        'step 0: loss: 1 of 1 elements differ, the largest difference is 1 (the largest element 2)'
    """
    for step, (computed, reference) in enumerate(zip(actual, expected, strict=True)):
        wrong = [
            f"{name}: {text}"
            for name, value in reference.items()
            if (text := _difference(computed[name].cpu(), value.cpu(), tolerance)) is not None
        ]
        if wrong:
            more = f"; and {len(wrong) - 1} more of {len(reference)} tensors" if len(wrong) > 1 else ""
            return f"step {step}: {wrong[0]}{more}"
    return None


def _difference(actual: Tensor, expected: Tensor, tolerance: float) -> str | None:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(actual, expected):
        return None
    apart = (actual.double() - expected.double()).abs()
    if tolerance and apart.max() <= tolerance * expected.double().abs().max():  # false for NaN
        return None
    nans = int(actual.isnan().sum())
    largest = apart[~apart.isnan()]
    facts = [f"{int((actual != expected).sum())} of {actual.numel()} elements differ"]
    facts += [f"{nans} are NaN"] if nans else []
    if largest.numel():
        whole = float(expected.double().abs().max())
        facts += [f"the largest difference is {float(largest.max()):.3g} (the largest element {whole:.3g})"]
    return ", ".join(facts)
