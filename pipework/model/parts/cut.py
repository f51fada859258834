"""Cuts any module into an `nn.Sequential` of parts."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pipework import torch_private
from pipework.model.parts.adapter import Adapter
from pipework.model.parts.dry_run import DryRun
from pipework.model.parts.part import Part
from pipework.model.parts.sample import arguments_of, few_rows
from pipework.model.parts.side_effects import generators_put_back, in_mode
from pipework.model.parts.skeleton import Skeleton
from pipework.model.parts.trace import CannotCut, PartSpan, Trace, unit_of
from pipework.model.parts.units import find_units
from pipework.signatures import signature_of
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

_logger = logging.getLogger("pipework")


class Cuttable:
    """A model of which a dry run has shown how it may be cut.

    Args:
        model: any module. It stays as it is; parts and model share their units.
        sample: what the model takes: keyword arguments, or a tuple of positional ones, or a tensor.
        blocks: classes, or their names, whose modules are called as a whole; None: the adapter's, else those in lists.
        adapter: of the model's library.
        has_rows: whether some rows of the sample are a sample, too.

    Attributes:
        containers: the modules around units, by their names in the model.
        trace: what the forward does.
        groups: the calls of units, those together between which it is not cut.
        sample: the arguments of the dry runs, positional and by name: of the sample that was given a few rows.
        result: what the model returned in the dry run, on the meta device.
        results: the same in training and in evaluation, by whether the model trains; one may be missing.

    Raises:
        CannotCut: the model has fewer than two units, or cannot be cut; the message says why.
    """

    def __init__(
        self,
        model: nn.Module,
        sample: Any,
        *,
        blocks: Collection[type | str] | None,
        adapter: Adapter | None = None,
        has_rows: bool = True,
    ) -> None:
        self.model = model
        self.adapter = Adapter() if adapter is None else adapter
        refuse_own_forward(model)
        self._refuse_other_arguments(sample)
        self.adapter.prepare(model)
        self.units = find_units(model, self.adapter.blocks(model) if blocks is None else blocks)
        self._skeleton = Skeleton(model, self.units, self.adapter)
        self.containers = self._skeleton.containers
        self._refuse_hooks()
        self.sample = few_rows(sample) if has_rows else arguments_of(sample)
        try:
            self.trace, self.result = self._traced()
        except (TypeError, AttributeError) as error:
            if not isinstance(sample, (list, str)):
                raise
            raise CannotCut(
                f"the sample is a {type(sample).__name__}, which the forward of {type(model).__name__} got as its "
                f"first argument, and failed ({error}): wanted a dict of keyword arguments, {{'x': x}}, "
                "a tuple of positional ones, or a tensor"
            ) from error
        self.results = {model.training: self.result}
        self.trace = self.trace.joined(self._traced_in_other_mode())
        self.groups = self._grouped()

    def sequential(self, balance: Sequence[int] | None = None) -> nn.Sequential:
        """The model as layers.

        Args:
            balance: how many groups each layer has; None: one.

        Raises:
            ValueError: the balance is for another number of groups.
        """
        sizes = [1] * len(self.groups) if balance is None else list(balance)
        if sum(sizes) != len(self.groups) or min(sizes, default=0) < 1:
            names = ", ".join(group[0] for group in self.groups)
            raise ValueError(
                f"balance {sizes} is for {sum(sizes)} groups of units, and {type(self.model).__name__} has "
                f"{len(self.groups)}: {names}"
            )
        counts = [sum(len(group) for group in self.groups[:end]) for end in itertools.accumulate(sizes, initial=0)]
        parts = []
        for start, stop in itertools.pairwise(counts):
            span = PartSpan(self.trace, start, stop, stop == counts[-1])
            parts.append(Part(self._skeleton.copy(self._local(span))[0], span, self.adapter))
        layers = nn.Sequential(*parts)
        layers.training = self.model.training
        return layers

    def result_of(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """What the model returns in a dry run with other arguments: zeros, and the loss of these, with their graph."""
        return DryRun(self._skeleton, (arguments, keywords), 1.0, computes_losses=True).run()

    def _traced(self) -> tuple[Trace, Any]:
        """What the forward does, and what it returned, on the meta device."""
        kind = type(self.model).__name__
        with generators_put_back() as drawn:
            run = DryRun(self._skeleton, self.sample, draw=1.0)
            result = nested.replaced(run.run(), Tensor, lambda each: torch.empty_like(each, device="meta"))
        trace = run.trace()
        if drawn:
            raise CannotCut(
                f"{kind}'s forward draws numbers from {' and '.join(drawn)}, outside of the units at which it is cut, "
                "and each part would draw others: switch that off in training, draw them with torch, or leave it to a "
                "unit"
            )
        if run.decides:
            other = DryRun(self._skeleton, self.sample, draw=0.0)
            other.run()
            if other.trace().order != trace.order:
                varying = sorted({unit_of(call) for call in {*other.trace().order} ^ {*trace.order}})
                raise CannotCut(
                    f"{kind}'s forward decides with random numbers which units it calls ({', '.join(varying[:3])}): "
                    "set the probability with which layers are left out to 0"
                )
        if len(trace.order) < 2:
            raise CannotCut(
                f"{kind} has {len(trace.order)} unit{'' if len(trace.order) == 1 else 's'} at which it could "
                "be cut: units are the modules that its forward calls, and those in lists; blocks= names their classes"
            )
        return trace, result

    def _traced_in_other_mode(self) -> Trace | None:
        """What the forward does in evaluation if the model is in training, and the other way round; None: nothing.

        Raises:
            CannotCut: what it does then cannot be cut.
        """
        training = not self.model.training
        try:
            with in_mode(self.model.modules(), training=training):
                trace, self.results[training] = self._traced()
                return trace
        except CannotCut:
            raise
        except Exception:  # it may need other inputs then
            _logger.debug("%s runs in one mode only with the sample", type(self.model).__name__, exc_info=True)
            return None

    def _refuse_other_arguments(self, sample: Any) -> None:
        """Raises an error if the forward does not take the sample."""
        kind = type(self.model)
        arguments, keywords = arguments_of(sample)
        try:
            signature_of(kind.forward).bind(self.model, *arguments, **keywords)
        except TypeError as error:
            raise CannotCut(
                f"the sample does not go with the forward of {kind.__name__}: {error}; a dict has keyword arguments, "
                "a tuple positional ones, and (batch,) gives one of them as it is"
            ) from None

    def _refuse_hooks(self) -> None:
        """Raises an error for what is called with each run of a container, since several parts run it."""
        for name, module in self.containers.items():
            if not name:
                continue
            if "forward" in vars(module):
                raise CannotCut(
                    f"the forward of {name!r} ({type(module).__name__}) has been replaced on the module itself, and "
                    "each part needs one of its own: write it into a class, or make it a unit with blocks="
                )
            if torch_private.all_hooks(module) and not self.adapter.owns_hooks(module):
                raise CannotCut(
                    f"{name!r} ({type(module).__name__}) has hooks, and its forward runs in every part, so that they "
                    "would be called more often than once: register them on a unit "
                    f"({', '.join(list(self.units)[:3])}, ...), or on the model"
                )

    def _grouped(self) -> list[list[str]]:
        """A unit without parameters stays with the one before it, or behind it if it is the first."""
        groups: list[list[str]] = [[]]
        has_parameters = False
        for call in self.trace.order:
            if next(self.units[unit_of(call)].parameters(), None) is not None:
                if has_parameters:
                    groups.append([])
                has_parameters = True
            groups[-1].append(call)
        return groups

    def _local(self, span: PartSpan) -> set[str]:
        """The names of the units of a part, and of the parameters of containers that it has.

        They are the units that it calls, and the parameters and units of which its forward reads tensors itself.
        """
        owned = [source for source in self.trace.uses if source.kind in ("parameter", "buffer")]
        local = {unit_of(call) for call in self.trace.order[span.start : span.stop]}
        local |= {source.name for source in owned if span.reads(source)}
        if span.is_last:  # what is never called or read must be somewhere
            called = {unit_of(call) for call in self.trace.order}
            read = {source.name for source in owned if source.kind == "parameter"}
            local |= {*self.units, *self._skeleton.own_parameters} - called - read
        return local


def refuse_no_module(model: object) -> None:
    """Raises a TypeError if this is no module, such as a class, or a sample in place of the model."""
    if not isinstance(model, nn.Module):
        got = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"the model must be an nn.Module, got {got}: give the model first, and then the sample")


def refuse_own_forward(model: nn.Module) -> None:
    """Raises a CannotCut if a forward was put on the module itself, or compiled, which parts would not run."""
    refuse_no_module(model)
    if torch_private.is_compiled(model):
        kind = type(torch_private.uncompiled(model)).__name__
        raise CannotCut(
            f"this {kind} was compiled as a whole, and its parts run the forward that it has without that: give the "
            "model itself, and compile its layers, such as `for block in model.blocks: block.compile()`; or the "
            "pipe's, pipe.compile()"
        )
    if "forward" in model.__dict__:
        raise CannotCut(
            f"the forward of this {type(model).__name__} has been replaced on the module itself, for example by "
            "accelerator.prepare() or by attaching a pipe: cut the model before that, or the module that the new "
            "forward calls; `del model.forward` takes a pipe off again"
        )
