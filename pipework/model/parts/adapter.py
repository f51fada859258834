"""What the modules of one library need beyond PyTorch to be cut into parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from pipework.model.parts.execution.side_outputs import NoSideOutputs

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import nn

    from pipework.model.parts.execution.side_outputs import SideOutputs


class Adapter(Protocol):
    """What is special about a kind of models."""

    @property
    def side_outputs(self) -> SideOutputs:
        """Collects what units give beside what they return."""

    @property
    def masks(self) -> tuple[str, ...]:
        """The names of arguments that say of each position whether it counts."""

    def blocks(self, model: nn.Module) -> Collection[type | str] | None:
        """The classes of units; None: the elements of lists."""

    def shared(self, model: nn.Module) -> Iterable[object]:
        """Objects that all parts use together, such as a configuration; they are not copied."""

    def stand_in(self, stand_in: nn.Module, unit: nn.Module) -> nn.Module:
        """Completes what stands in place of a unit of another part."""

    def owns_hooks(self, module: nn.Module) -> bool:
        """Whether all hooks of a container are the library's, and right in every part that runs its forward."""

    def prepare(self, model: nn.Module) -> None:
        """Called before the model is copied."""

    def attached(self, model: nn.Module) -> None:
        """Called when a pipe has been attached to the model."""

    def inputs(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which the forward is called."""

    def weighs(self, target: str, weight: Callable[[Any], Any] | None) -> None:
        """Called with how the losses of micro-batches are weighed in their mean.

        Args:
            target: the argument of the forward that the loss needs.
            weight: from the target of a micro-batch; None: by its rows.
        """

    def mini_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, of which some may be about the whole mini-batch."""

    def micro_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The same for one micro-batch, in the last part, which computes the loss."""

    def result(self, output: Any) -> Any:
        """What the last part returns of what the forward does."""

    def form(self, usual: Any, keywords: Mapping[str, Any]) -> Any:
        """What a call in training returns, without tensors.

        Args:
            usual: the same for the sample.
            keywords: the arguments of the call by name.
        """

    def is_generating(self, keywords: Mapping[str, Any]) -> bool:
        """Whether a call is one of many in which the model makes its own next input."""

    def initialiser(self, model: nn.Module, name: str) -> Callable[[], object] | None:
        """What fills a module that was built on the meta device, after its `reset_parameters()`; None: nothing more.

        Args:
            model: the copy of the model in a part.
            name: of the module in the model.
        """

    def loss_weight(self, target: Any, result: Any, ask: Callable[[Any], Any]) -> Callable[[Any], Any] | None:
        """From the target of a micro-batch to how much its loss counts; None: its rows.

        Args:
            target: of a few rows.
            result: what the model returns for them, without values.
            ask: from another target of these rows to what the model returns in a dry run, with its graph.
        """

    def comparable(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments without what makes a loss that is of each micro-batch, or of more, by nature."""


class PlainAdapter:
    """For modules that need nothing else."""

    side_outputs: SideOutputs = NoSideOutputs()
    masks: tuple[str, ...] = ()

    def blocks(self, model: nn.Module) -> None:
        """See `Adapter.blocks`."""

    def shared(self, model: nn.Module) -> Iterable[object]:
        """See `Adapter.shared`."""
        return ()

    def stand_in(self, stand_in: nn.Module, unit: nn.Module) -> nn.Module:
        """See `Adapter.stand_in`."""
        return stand_in

    def owns_hooks(self, module: nn.Module) -> bool:
        """See `Adapter.owns_hooks`."""
        return False

    def prepare(self, model: nn.Module) -> None:
        """See `Adapter.prepare`."""

    def attached(self, model: nn.Module) -> None:
        """See `Adapter.attached`."""

    def inputs(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See `Adapter.inputs`."""
        return arguments, keywords

    def weighs(self, target: str, weight: Callable[[Any], Any] | None) -> None:
        """See `Adapter.weighs`."""

    def mini_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """See `Adapter.mini_batch`."""
        return keywords

    def micro_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """See `Adapter.micro_batch`."""
        return keywords

    def result(self, output: Any) -> Any:
        """See `Adapter.result`."""
        return output

    def form(self, usual: Any, keywords: Mapping[str, Any]) -> Any:
        """See `Adapter.form`."""
        return usual

    def is_generating(self, keywords: Mapping[str, Any]) -> bool:
        """See `Adapter.is_generating`."""
        return False

    def initialiser(self, model: nn.Module, name: str) -> None:
        """See `Adapter.initialiser`."""

    def loss_weight(self, target: Any, result: Any, ask: Callable[[Any], Any]) -> None:
        """See `Adapter.loss_weight`."""

    def comparable(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """See `Adapter.comparable`."""
        return keywords
