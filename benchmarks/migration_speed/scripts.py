"""Old scripts, which make a pipe and train with it. The same lines run on the old library and on its adapter."""

from __future__ import annotations

import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import rpc
from torch.nn import functional as F

from benchmarks import harness
from pipework import Pipe, skip

DEVICES = ["cpu", "cpu"]


@dataclass(frozen=True)
class Task:
    """The model and the mini-batch of all scripts.

    Attributes:
        build: makes the model, with the same values each time, from a library's skip connections.
        batch: the input and the target.
        balance: the layers of the two partitions.
        chunks: micro-batches.
    """

    build: Callable[[Any], nn.Sequential]
    batch: tuple[Tensor, Tensor]
    balance: list[int]
    chunks: int


@dataclass(frozen=True)
class Script:
    """A script that has come as far as its training loop.

    Attributes:
        model: whose parameters get the gradients.
        step: forward, loss and backward.
    """

    model: nn.Module
    step: Callable[[], None]


Starter = Callable[[Task, str], Script]
"""Starts a script, in a checkpoint mode."""


def balanced(pipe_class: Any, skips: Any) -> Starter:
    """Scripts for torchgpipe's `GPipe` and fairscale's `Pipe`.

    Args:
        pipe_class: one of these two, or its adapter.
        skips: the skip connections that belong to it.
    """

    def start(task: Task, mode: str) -> Script:
        model = pipe_class(task.build(skips), task.balance, devices=DEVICES, chunks=task.chunks, checkpoint=mode)
        in_device, out_device = model.devices[0], model.devices[-1]
        batch, target = task.batch

        def step() -> None:
            output = model(batch.to(in_device))
            F.mse_loss(output, target.to(out_device)).backward()

        return Script(model, step)

    return start


def synchronous(pipe_class: Any, skips: Any) -> Starter:
    """Scripts for the `Pipe` of `torch.distributed.pipeline.sync`, which place the layers themselves."""

    def start(task: Task, mode: str) -> Script:
        layers = list(task.build(skips))
        first, second = layers[: task.balance[0]], layers[task.balance[0] :]
        placed = nn.Sequential(nn.Sequential(*first).to(DEVICES[0]), nn.Sequential(*second).to(DEVICES[1]))
        model = pipe_class(placed, chunks=task.chunks, checkpoint=mode)
        batch, target = task.batch

        def step() -> None:
            output = model(batch).local_value()
            F.mse_loss(output, target).backward()

        return Script(model, step)

    return start


def rewritten(task: Task, mode: str) -> Script:
    """A script that has left the old library: the loss inside, and 1F1B."""
    options = {"balance": task.balance, "devices": DEVICES, "schedule": "1f1b", "loss_fn": F.mse_loss}
    model = Pipe(task.build(skip), task.chunks, mode, **options)
    batch, target = task.batch
    return Script(model, lambda: model(batch, target=target).backward())


def unpipelined(task: Task) -> Script:
    """No pipe: gradient accumulation over the micro-batches, on the calling thread."""
    model = task.build(skip)
    pieces = list(zip(*(each.chunk(task.chunks) for each in task.batch), strict=True))

    def step() -> None:
        for batch, target in pieces:
            (F.mse_loss(model(batch), target) / len(pieces)).backward()

    return Script(model, step)


@dataclass(frozen=True)
class Library:
    """An old library, and where its parts are imported from.

    Attributes:
        name: as the table calls it.
        version: that scripts are written for; None: the library does not run on today's PyTorch.
        package: has the pipe's class.
        adapter: has the adapter's class.
        pipe_class: its name.
        skips: of both packages, the module of the skip connections.
        script: makes a script for the library from a pipe's class and skip connections.
    """

    name: str
    version: str | None
    package: str
    adapter: str
    pipe_class: str
    skips: str
    script: Callable[[Any, Any], Starter]

    def through_the_adapter(self) -> Starter:
        return self._from(self.adapter)

    def original(self) -> Starter | None:
        """The script on the library itself; None where that is not installed."""
        if self.version is None:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fairscale warns that its Pipe has moved to PyTorch, which has dropped it
            there = harness.old_library(self.name, self.version, self.package) is not None
            return self._from(self.package) if there else None

    def _from(self, package: str) -> Starter:
        module = importlib.import_module(package)
        return self.script(getattr(module, self.pipe_class), importlib.import_module(package + self.skips))


LIBRARIES = (
    Library("torchgpipe", "0.0.7", "torchgpipe", "pipework.compat.torchgpipe", "GPipe", ".skip", balanced),
    Library(
        "fairscale",
        "0.4.13",
        "fairscale.nn",
        "pipework.compat.fairscale.nn",
        "Pipe",
        ".pipe.skip",
        balanced,
    ),
    Library(
        "torch.distributed.pipeline.sync",
        None,
        "torch.distributed.pipeline.sync",
        "pipework.compat.sync",
        "Pipe",
        ".skip",
        synchronous,
    ),
)


@contextmanager
def remote_procedures() -> Iterator[None]:
    """RPC, which scripts for `torch.distributed.pipeline.sync` initialise."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's own, about what it has deprecated and uses here itself
        options = rpc.TensorPipeRpcBackendOptions(init_method=(Path(folder) / "rpc").as_uri())
        rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
        try:
            yield
        finally:
            rpc.shutdown()


@contextmanager
def running() -> Iterator[Callable[[Starter, Task, str], Script]]:
    """Starts scripts, and ends them."""
    with ExitStack() as stack:

        def start(starter: Starter, task: Task, mode: str) -> Script:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # fairscale's, as above
                script = starter(task, mode)
            if hasattr(script.model, "pipeline"):
                # fairscale ends its threads when this attribute is deleted; else the interpreter would not end.
                stack.callback(delattr, script.model, "pipeline")
            return script

        yield start
