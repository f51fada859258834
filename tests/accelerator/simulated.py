"""The simulated accelerator: device type "sim", on the CPU's memory.

Importing this module builds the device (see :mod:`tests.accelerator.build`) and makes it PyTorch's accelerator, for the
whole process and for ever. `tests/accelerator/device/` has its parts, and how each compares with CUDA.
"""

import atexit
from collections.abc import Iterable
from types import ModuleType

import torch
import torch._meta_registrations  # the shapes of what has no meta kernel in C++
from torch import Generator

from tests.accelerator import recurrent
from tests.accelerator.build import build

_device = build()

MAX_DEVICES: int = _device.MAX_DEVICES


def configure(
    *,
    devices: int = 4,
    delay_probability: float = 0.0,
    delay_us: int = 0,
    seed: int = 0,
    races: int = 1,
    poison: int = 1,
    stacks: bool = True,
    memory_limit: int | Iterable[int] = 0,
) -> None:
    """Waits for all streams, and sets every setting; what is not given gets its default.

    Args:
        devices: How many there are, at most MAX_DEVICES.
        delay_probability: That a stream waits before a piece of work.
        delay_us: For how many microseconds at most; the time is drawn.
        seed: Of the delays.
        races: 0: they are not looked for. 1: they are; what one host thread has waited for, all threads know. 2: each
            thread knows only what it has waited for itself.
        poison: 0: freed memory keeps its values. 1: it is overwritten when it is freed, as if it were reused at once.
            2: it is overwritten when it is reused, as late as on CUDA.
        stacks: Whether reports have the Python frames of both accesses.
        memory_limit: Bytes of each device, or of all devices in a list; 0 is no limit.

    Raises:
        ValueError: if the number of devices is wrong.
        RuntimeError: if a kernel had failed and nobody had seen its error.
    """
    if not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"devices must be between 1 and {MAX_DEVICES}, got {devices}")
    limits = [memory_limit] * MAX_DEVICES if isinstance(memory_limit, int) else [*memory_limit]
    limits += [0] * (MAX_DEVICES - len(limits))
    _device.synchronize_all()
    _device.configure(devices, delay_probability, delay_us, seed, races, poison, stacks, limits)


def synchronize_all() -> None:
    """Waits for all streams of all devices.

    Raises:
        RuntimeError: if a kernel had failed and nobody had seen its error.
    """
    _device.synchronize_all()


def races() -> list[str]:
    """The races since the last call: each access that nothing orders after an earlier one, with both stacks."""
    return _device.take_races()


def poison_reads() -> list[str]:
    """The kernels that have read memory that was freed or never written, since the last call.

    Only floating-point tensors are looked at that have no gaps.
    """
    return _device.take_poison_reads()


def counts() -> dict[str, int]:
    """How often since `reset_counts` there were launches, allocations, host_waits and so on; 0 is left out."""
    return _device.counts()


def host_waits() -> dict[str, int]:
    """How often the host had to wait since `reset_counts`, by reason."""
    return _device.host_waits()


def reset_counts() -> None:
    """Begins to count anew."""
    _device.reset_counts()


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return _device.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return _device.current_device() if index is None else index


def _device_module() -> ModuleType:
    """What is `torch.sim`, with the names that `torch.cuda` has."""
    module = ModuleType("torch.sim")
    generators: tuple[Generator, ...] = tuple(map(_device.default_generator, range(MAX_DEVICES)))

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    def manual_seed(seed: int) -> None:
        generators[_device.current_device()].manual_seed(seed)

    def statistic(name: str):
        return lambda device=None: _device.stats(_index(device))[name]

    members = {
        "Event": torch.Event,
        "Stream": torch.Stream,
        "_is_in_bad_fork": lambda: False,
        "_initialized": True,  # which torch.utils.checkpoint asks
        "_lazy_init": lambda: None,
        "current_device": _device.current_device,
        "current_stream": lambda device=None: torch.accelerator.current_stream(device),
        "default_generators": generators,
        "device": lambda device: torch.accelerator.device_index(_index(device)),
        "device_count": _device.device_count,
        "empty_cache": torch.accelerator.empty_cache,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16, torch.float32],
        "get_device_name": lambda device=None: "simulated accelerator",
        "get_rng_state": lambda device=None: generators[_index(device)].get_state(),
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "max_memory_allocated": statistic("peak_allocated"),
        "max_memory_reserved": statistic("peak_reserved"),
        "memory_allocated": statistic("allocated"),
        "memory_reserved": statistic("reserved"),
        "reset_peak_memory_stats": lambda device=None: torch.accelerator.reset_peak_memory_stats(_index(device)),
        "set_device": lambda device: _device.set_device(_index(device)),
        "set_rng_state": lambda state, device=None: generators[_index(device)].set_state(state),
        "synchronize": lambda device=None: torch.accelerator.synchronize(_index(device)),
    }
    vars(module).update(members)
    return module


def _end() -> None:
    """Kernels may run Python code, which must not be after Python's end."""
    _device.synchronize_all()
    _device.interpreter_ends()


torch.utils.rename_privateuse1_backend("sim")
_device.register_hooks()
torch._register_device_module("sim", _device_module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
_recurrent_cells = recurrent.register()
configure()
atexit.register(_end)
