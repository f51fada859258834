"""`python -m pipework env`: versions and devices, for bug reports."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pipework.cli.arguments import Report, add_command

if TYPE_CHECKING:
    from pipework.cli.arguments import Commands

_OTHERS = ("numpy", "safetensors", "transformers")
# Those of the drivers, the allocators and the libraries of kernels.
_VARIABLES: Final = (
    "CUBLAS", "CUDA", "CUDNN", "GPU_", "HIP_", "HSA_", "MIOPEN_", "NCCL_", "NVIDIA_TF32", "PYTORCH_", "RCCL_", "ROCR_",
    "SYCL_", "TORCH_", "ZE_", "MKL_NUM_THREADS", "OMP_NUM_THREADS",
)  # fmt: skip


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    text = "print versions, devices and the environment variables of drivers and libraries, for bug reports"
    add_command(commands, "env", lambda arguments: Report(lines()), text)


def lines() -> list[str]:
    """The facts, one a line, in the form ``name: value``."""
    found = facts()
    width = max(map(len, found))
    return [f"{name + ':':<{width + 2}}{value}" for name, value in found.items()]


def facts() -> dict[str, str]:
    """Versions, devices, and the environment variables that change how PyTorch uses them."""
    return {
        # The version of the running code, which may differ from the installed one.
        "pipework": import_module("pipework").__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        # The cores that this process may use, which a container may limit.
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        **_torch_facts(),
        **{name: _asked(functools.partial(metadata.version, name)) or "not installed" for name in _OTHERS},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }


def _torch_facts() -> dict[str, str]:
    try:
        torch: Any = import_module("torch")
    except ImportError as error:
        return {"torch": f"cannot be imported: {error}"}
    questions: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.__version__,
        "intra-op threads": torch.get_num_threads,
        "gloo": lambda: "available" if torch.distributed.is_gloo_available() else "not available",
        "nccl": lambda: "available" if torch.distributed.is_nccl_available() else "not available",
        "accelerators": lambda: "none",
    }
    if torch.accelerator.is_available():
        kind, count = torch.accelerator.current_accelerator().type, torch.accelerator.device_count()
        module: Any = getattr(torch, kind, None)
        questions |= {
            "accelerators": lambda: f"{count} x {kind}",
            **{f"{kind}:{index}": functools.partial(_device, module, index) for index in range(count)},
            **{f"{name} runtime": functools.partial(getattr, torch.version, name) for name in ("cuda", "hip", "xpu")},
            "driver": lambda: Path("/proc/driver/nvidia/version").read_text("utf-8").partition("\n")[0],
            "cudnn": lambda: torch.backends.cudnn.version(),
            "nccl version": lambda: ".".join(map(str, module.nccl.version())),
            "float32 products": torch.get_float32_matmul_precision,
        }
    answers = {name: _asked(question) for name, question in questions.items()}
    return {name: answer for name, answer in answers.items() if answer}


def _device(module: Any, index: int) -> str:
    free, total = module.mem_get_info(index)
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    return f"{module.get_device_name(index)}, capability {module.get_device_capability(index)}, {memory}"


def _asked(question: Callable[[], object]) -> str:
    """The answer; nothing if this kind of device has no such question, and the error of one that fails."""
    try:
        return str(question() or "")
    except (AttributeError, OSError, NotImplementedError, metadata.PackageNotFoundError):
        return ""
    except Exception as error:  # a report about a broken driver must not fail because of it
        return f"cannot be asked: {error}".partition("\n")[0]
