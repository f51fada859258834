"""`python -m pipework env`: versions and devices, for bug reports."""

from __future__ import annotations

import argparse
import functools
import os
import platform
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipework.cli.report import Report

if TYPE_CHECKING:
    from pipework.cli.draw import Commands

_OTHERS = ("numpy", "safetensors", "transformers")
# Those of the drivers, the allocators and the libraries of kernels.
_VARIABLES: Final = (
    "CUBLAS", "CUDA", "CUDNN", "GPU_", "HIP_", "HSA_", "MIOPEN_", "NCCL_", "NVIDIA_TF32", "PYTORCH_", "RCCL_", "ROCR_",
    "SYCL_", "TORCH_", "ZE_", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "env",
        help="print versions, devices and settings, for bug reports",
        description="Print versions, devices, and the environment variables of drivers and libraries; paste them into "
        "a bug report.",
    )
    parser.set_defaults(run=run)


def version() -> str:
    """The version of pipework.

    Example:
        >>> version().split(".")[0].isdigit()
        True
    """
    # The version of the running code, which may differ from the installed one.
    found = getattr(import_module("pipework"), "__version__", None)
    return str(found) if found is not None else _installed("pipework")


def run(arguments: argparse.Namespace) -> Report:
    """Run the command; lines have the form ``name: value``."""
    return Report(lines())


def lines() -> list[str]:
    """The facts, one a line, in the form ``name: value``."""
    found = facts()
    width = max(map(len, found))
    return [f"{name + ':':<{width + 2}}{value}" for name, value in found.items()]


def facts() -> dict[str, str]:
    """Versions, devices, and the environment variables that change how PyTorch uses them."""
    return {
        "pipework": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        # The cores that this process may use, which a container may limit.
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        **_torch_facts(),
        **{name: _installed(name) for name in _OTHERS},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _torch_facts() -> dict[str, str]:
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        # A broken installation is reported as such.
        return {"torch": "not installed" if error.name == "torch" else f"cannot be imported: {error}"}
    distributed = torch.distributed
    backends = {
        name: distributed.is_available() and bool(getattr(distributed, f"is_{name}_available", lambda: False)())
        for name in ("gloo", "nccl")
    }
    return {
        "torch": str(torch.__version__),
        "accelerators": _accelerators(torch),
        **_details_of_accelerators(torch),
        "intra-op threads": str(torch.get_num_threads()),
        **{name: "available" if there else "not available" for name, there in backends.items()},
    }


def _accelerators(torch: Any) -> str:
    kind = _kind(torch)
    if kind is None:
        return "none"
    count = torch.accelerator.device_count()
    names = sorted({_device_name(torch, kind, index) for index in range(count)} - {""})
    return f"{count} x {kind}" + (f" ({', '.join(names)})" if names else "")


def _details_of_accelerators(torch: Any) -> dict[str, str]:
    """Each device, and what lies between PyTorch and it; nothing without an accelerator."""
    kind = _kind(torch)
    if kind is None:
        return {}
    count = torch.accelerator.device_count()
    module = getattr(torch, kind, None)
    wanted: dict[str, Callable[[], object]] = {
        f"{kind}:{index}": functools.partial(_device, torch, module, kind, index) for index in range(count)
    }
    wanted["runtime"] = lambda: ", ".join(
        f"{name} {number}" for name in ("cuda", "hip", "xpu") if (number := getattr(torch.version, name, None))
    )
    wanted["driver"] = _driver
    wanted["cudnn"] = lambda: torch.backends.cudnn.version() or ""
    wanted["nccl version"] = lambda: ".".join(map(str, module.nccl.version()))  # type: ignore[union-attr]
    if count > 1:
        wanted["peer access"] = functools.partial(_peer_access, module, count)
    wanted["float32 products"] = torch.get_float32_matmul_precision
    found = {name: _asked(question) for name, question in wanted.items()}
    return {name: value for name, value in found.items() if value}


def _asked(question: Callable[[], object]) -> str:
    """The answer; nothing if this kind of device has no such question, and the error of one that fails."""
    try:
        return str(question())
    except (AttributeError, OSError, NotImplementedError):
        return ""
    except Exception as error:  # a report about a broken driver must not fail because of it
        return f"cannot be asked: {error}".partition("\n")[0]


def _device(torch: Any, module: Any, kind: str, index: int) -> str:
    parts = [_device_name(torch, kind, index)]
    if hasattr(module, "get_device_capability"):
        parts.append(f"capability {_asked(lambda: module.get_device_capability(index))}")
    if hasattr(module, "mem_get_info"):
        free, total = module.mem_get_info(index)
        parts.append(f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    return ", ".join(filter(None, parts))


def _driver() -> str:
    return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]


def _peer_access(module: Any, count: int) -> str:
    """The pairs of devices of which the first can read the second's memory."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    able = [f"{a}-{b}" for a, b in pairs if module.can_device_access_peer(a, b)]
    return "all pairs" if len(able) == len(pairs) else ", ".join(able) or "no pair"


def _kind(torch: Any) -> str | None:
    accelerator = getattr(torch, "accelerator", None)  # absent from older versions
    if accelerator is None or not accelerator.is_available():
        return None
    return str(accelerator.current_accelerator().type)


def _device_name(torch: Any, kind: str, index: int) -> str:
    name = getattr(getattr(torch, kind, None), "get_device_name", None)
    return "" if name is None else str(name(index))


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
