"""`python -m pipework env`: versions, environment variables, and PyTorch's own report on devices, for bug reports."""

from __future__ import annotations

import os
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any, Final

from pipework.cli.arguments import Report, add_command

if TYPE_CHECKING:
    from pipework.cli.arguments import Commands

_OTHERS: Final = ("safetensors", "transformers", "peft")
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
    """The report."""
    found = {
        # The version of the running code, which may differ from the installed one.
        "pipework": import_module("pipework").__version__,
        # The cores that this process may use, which a container may limit.
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        **{name: _version(name) for name in _OTHERS},
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }
    try:
        collect_env: Any = import_module("torch.utils.collect_env")
        report = collect_env.get_pretty_env_info()
    except Exception as error:  # a report about a broken installation must not fail because of it
        report = f"PyTorch's report cannot be made: {type(error).__name__}: {error}"
    return [*(f"{name}: {value}" for name, value in found.items()), "", *report.splitlines()]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
