"""A pipe before its first training mini-batch, from which its plan is to be made: `schedule="auto"`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from pipework.assignment.checks import not_sequential
from pipework.model.given import MicroBatches
from pipework.model.materialize import on_meta
from pipework.planning.plan import Plan
from pipework.planning.profiling.plan_model import plan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from pipework.distributed.mesh import Mesh
    from pipework.model.with_device import Device

AUTO: Final = "auto"
_OPTIONS: Final = ("batch", "chunks", "optimizer", "schedules", "seconds", "iterations", "timeout", "progress")


@dataclass(frozen=True)
class FirstMiniBatch:
    """A pipe's layers and arguments, until there is a mini-batch to measure them with.

    Attributes:
        module: the layers.
        loss_fn: see `Pipe`.
        devices: see `Pipe`.
        memory: see `pipework.plan`.
        chunks: the number of micro-batches, or 1: the planner's choice.
        options: of `pipework.plan`, beside these.
        lock: held while a mini-batch makes the plan.
    """

    module: nn.Sequential
    loss_fn: Callable[[Any, Any], Tensor] | None
    devices: Sequence[Device] | None
    memory: float | str | Mapping[str, float | str] | None
    chunks: int
    options: Mapping[str, Any]
    lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a pipe has a lock of its own."""
        return FirstMiniBatch, tuple(getattr(self, each.name) for each in fields(self) if each.init)

    @classmethod
    def of(
        cls,
        module: nn.Sequential,
        loss_fn: Callable[[Any, Any], Tensor] | None,
        devices: Sequence[Device] | None,
        memory: float | str | Mapping[str, float | str] | None,
        plan: Plan | Mapping[str, Any] | None,
        given: Mapping[str, tuple[Any, Any]],
    ) -> FirstMiniBatch:
        """Checks a pipe's arguments.

        Args:
            module: see `Pipe`.
            loss_fn: see `Pipe`.
            devices: see `Pipe`.
            memory: see `Pipe`.
            plan: the options of `pipework.plan`.
            given: further arguments of the pipe, each with its default.

        Raises:
            TypeError: `module` is no `nn.Sequential`, or `plan` no mapping.
            ValueError: an argument is given that the plan will decide, or layers have no data.
        """
        if not isinstance(module, nn.Sequential):
            raise not_sequential(module)
        if isinstance(plan, Plan):
            raise ValueError("schedule='auto' makes a plan, and plan= is one: leave schedule= or plan= out")
        if plan is not None and not isinstance(plan, Mapping):
            raise TypeError(f"plan is {plan!r}: with schedule='auto', wanted options of pipework.plan in a dict")
        if unknown := [name for name in plan or () if name not in _OPTIONS]:
            raise ValueError(f"plan has {unknown[0]!r}: with schedule='auto', its options are {', '.join(_OPTIONS)}")
        for name, (value, default) in given.items():
            if name != "chunks" and value is not default and value != default:
                raise ValueError(f"{name}= is given beside schedule='auto', which decides it: leave one of them out")
        if any(map(on_meta, module)):
            raise ValueError(
                "schedule='auto' measures layers, and some are on the meta device: plan with estimated times, "
                "pipework.plan(pipework.planning.profile(model, x, rates={...}), devices=[...])"
            )
        return cls(module, loss_fn, devices, memory, given["chunks"][0], dict(plan or {}))

    def plan(
        self,
        inputs: tuple[Any, ...],
        keywords: Mapping[str, Any],
        target: Any,
        *,
        mesh: Mesh | DeviceMesh | None = None,
    ) -> Plan:
        """Makes the plan.

        Args:
            inputs: of the first layer.
            keywords: likewise.
            target: of the loss.
            mesh: see `Pipe`.

        Raises:
            ValueError: there is no target, or no plan fits.
        """
        if target is None:
            raise ValueError(
                "schedule='auto' plans a step with its loss: call the pipe with a target, pipe(x, target=y)"
            )
        if any(isinstance(each, MicroBatches) for each in (*inputs, *keywords.values(), target)):
            raise ValueError(
                "schedule='auto' chooses the number of micro-batches, and these are split already: give whole tensors, "
                "or plan with pipework.plan(..., chunks=number)"
            )
        return plan(
            self.module,
            inputs,
            target=target,
            loss_fn=self.loss_fn,
            devices=self.devices,
            memory=self.memory,
            keywords=keywords,
            mesh=mesh,
            **{**({} if self.chunks == 1 else {"chunks": self.chunks}), **self.options},
        )


def refuse_memory(memory: object) -> None:
    """Raises a ValueError for a limit of memory without schedule='auto'."""
    if memory is not None:
        raise ValueError("memory= is for schedule='auto'; with another schedule nothing is chosen that it limits")
