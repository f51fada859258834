"""The states of all random generators that a training uses, as plain values and tensors."""

from __future__ import annotations

import logging
import random
import sys
from typing import Any

import torch


def random_states() -> dict[str, Any]:
    """The states of PyTorch's generators (CPU and accelerators), Python's and, if numpy was imported, numpy's.

    Example:
        >>> before = random_states()
        >>> numbers = torch.rand(2), random.random()
        >>> set_random_states(before)
        >>> torch.equal(torch.rand(2), numbers[0]), random.random() == numbers[1]
        (True, True)
    """
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    module = _accelerator()
    if module is not None:
        states["accelerator"] = [module.get_rng_state(*place) for place in _places()]
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        # The key of a Mersenne Twister is the one array in it.
        state["state"] = {k: v.tolist() if isinstance(v, numpy.ndarray) else v for k, v in state["state"].items()}
        states["numpy"] = state
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """Restores the states of the generators that exist here."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    module, saved = _accelerator(), states.get("accelerator", [])
    places = _places() if module is not None else []
    for place, state in zip(places, saved, strict=False):
        module.set_rng_state(state, *place)
    if len(saved) != len(places):
        logging.getLogger("pipework").info(
            "the checkpoint has random states of %d accelerators, here are %d: those that both have were set",
            len(saved),
            len(places),
        )
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        numpy.random.set_state(states["numpy"])


def _places() -> list[tuple[int, ...]]:
    """The device argument for each accelerator's generator. Some kinds take none if there is one device."""
    count = torch.accelerator.device_count()
    return [()] if count == 1 else [(index,) for index in range(count)]


def _accelerator() -> Any:
    """PyTorch's module for the available accelerator."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module = getattr(torch, accelerator.type, None) if accelerator is not None else None
    return module if hasattr(module, "get_rng_state") else None
