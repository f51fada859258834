"""A part of a model: a layer that runs the model's own forward, from the first to the last of its units."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
from torch import nn

from pipework.model.parts import run as runs
from pipework.model.parts.leaves import tensors_in
from pipework.model.parts.run import AbsenceWatch, LeaveForward, Message, PartRun
from pipework.model.parts.skeleton import Unit
from pipework.runtime.random.streams import mix
from pipework.spot_checks import is_checked

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.model.parts.adapter import Adapter
    from pipework.model.parts.trace import PartSpan

_WATCHED_FIRST: Final = 16  # micro-batches, in which most ways through a forward are taken


class Part(nn.Module):
    """One of the consecutive layers into which a model has been cut.

    The first part takes what the model takes, the last one returns what the model returns. Between them goes a message:
    the model's inputs and what units returned, without the tensors that no later part reads.

    Args:
        model: a copy of the model's containers around the units of this part.
        span: the calls that this part computes.
        adapter: of the model's library.

    Attributes:
        state_prefix: without it the names of this part's tensors are those of the model's state dict.
    """

    state_prefix: ClassVar[str] = "model."

    def __init__(self, model: nn.Module, span: PartSpan, adapter: Adapter) -> None:
        super().__init__()
        self.model = model
        self.span = span
        self._adapter = adapter
        self.training = model.training
        self._runs: dict[tuple[bool, bool], int] = {}

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """What the model returns, or the message to the next part."""
        if arguments and isinstance(arguments[0], Message):
            message = arguments[0]
        else:
            message = Message.first(self._adapter.inputs(arguments, keywords))
        device, side_outputs = self._device(message), self._adapter.side_outputs
        run = PartRun(self.span, message, device, side_outputs)
        arguments, named = run.inputs()
        if self.span.is_last:
            named = self._adapter.micro_batch(named)
        if self._is_watched():
            run.watch = AbsenceWatch(run)
        with runs.using(run), run.watch or contextlib.nullcontext():
            run.begin()
            try:
                output = self.model.forward(*arguments, **named)
            except LeaveForward:
                return run.next_message()
        if not self.span.is_last:
            raise RuntimeError(
                f"the forward of {self.span.trace.model} ended before its last part: for the sample it also called "
                f"{', '.join(self.span.trace.order[self.span.stop :][:3])}; put what depends on the data into a unit"
            )
        result = self._adapter.result(output)
        if run.lacks_any(tensors_in(result)):
            raise run.reads_absent()
        return result

    def watch_again(self) -> None:
        """Called when the model has changed: the next micro-batches are watched, as the first ones were."""
        self._runs.clear()

    def _is_watched(self) -> bool:
        kind = self.training, torch.is_grad_enabled()
        number = self._runs.get(kind, 0)
        self._runs[kind] = number + 1
        return number < _WATCHED_FIRST or is_checked(number)

    @property
    def units_text(self) -> str:
        """The part as messages and tables call it: by its units, whose names are the model's."""
        return self.span.ends

    def units_here(self) -> dict[str, nn.Module]:
        """The units of this part by their names in the model, whose hooks and dictionaries of tensors they share."""
        units = (module for module in self.model.modules() if isinstance(module, Unit) and not module.is_elsewhere)
        return {unit.unit_name: unit for unit in units}

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        """Compiles the units. The forward around them ends with an exception, which `torch.compile` cannot trace."""
        for unit in self.units_here().values():
            unit.compile(*arguments, **keywords)

    def initialiser_of(
        self, module: nn.Module, own: Callable[[], object] | None, seed: int
    ) -> Callable[[], object] | None:
        """What fills a module that was built on the meta device; see `materialize_partitions`.

        Args:
            module: of this part.
            own: its own `reset_parameters`.
            seed: of the model; what a module draws depends on it and on the module's name.
        """
        name = next((name for name, each in self.model.named_modules() if each is module), None)
        if name is None:  # this part itself
            return None
        of_library = self._adapter.initialiser(self.model, name)
        fillers = [each for each in (own, of_library) if each is not None]

        def fill() -> None:
            torch.default_generator.manual_seed(mix(seed, zlib.crc32(name.encode()), 0))
            # Also parameters that only other parts have are filled, so that all parts draw the same for the others.
            absent = module.__dict__.get("elsewhere", ())
            module.__dict__.update(
                {each: torch.empty_like(getattr(module.whole, each), device="cpu") for each in absent}
            )
            try:
                for each in fillers:
                    each()
            finally:
                for each in absent:
                    module.__dict__.pop(each, None)

        return fill if fillers else None

    def extra_repr(self) -> str:
        """The units of this part."""
        return ", ".join(self.span.trace.order[self.span.start : self.span.stop])

    def _device(self, message: Message) -> torch.device:
        """The device of the part: that of its first parameter, else of the message."""
        tensors = [*itertools.islice(self.model.parameters(), 1)] or tensors_in(message)
        return tensors[0].device if tensors else torch.device("cpu")
