"""`python -m pipework env`: versions and devices, for bug reports."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

from pipework.cli.report import Report

if TYPE_CHECKING:
    from pipework.cli.draw import Commands

_OTHERS = ("numpy", "safetensors", "matplotlib", "transformers")


def add_to(commands: Commands) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "env",
        help="print versions and devices, for bug reports",
        description="Print versions and devices; paste them into a bug report.",
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
    facts = {
        "pipework": version(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        # The cores that this process may use, which a container may limit.
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1),
        **_torch_facts(),
        **{name: _installed(name) for name in _OTHERS},
    }
    width = max(map(len, facts))
    return Report([f"{name + ':':<{width + 2}}{value}" for name, value in facts.items()])


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
        "intra-op threads": str(torch.get_num_threads()),
        **{name: "available" if there else "not available" for name, there in backends.items()},
    }


def _accelerators(torch: Any) -> str:
    accelerator = getattr(torch, "accelerator", None)  # absent from older versions
    if accelerator is None or not accelerator.is_available():
        return "none"
    kind = accelerator.current_accelerator().type
    count = accelerator.device_count()
    module = getattr(torch, kind, None)
    name = getattr(module, "get_device_name", None)
    names = sorted({str(name(index)) for index in range(count)}) if name is not None else []
    return f"{count} x {kind}" + (f" ({', '.join(names)})" if names else "")


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"
