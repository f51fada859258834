"""What the modules of one library need beyond PyTorch to be cut into parts; these classes are for modules without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping

    from torch import nn

    from pipework.model.marks import OwnSplit


class SideOutputs:
    """What units give beside what they return: lists to which hooks of units append while a forward runs."""

    def mark(self) -> Any:
        """Where the lists end now; false where nothing is collected."""

    def since(self, mark: Any) -> dict[str, list[Any]]:
        """What has been appended after a mark, by list."""
        return {}

    def add(self, items: dict[str, list[Any]]) -> None:
        """Appends what a unit of another part has given."""

    def remove(self, mark: Any) -> None:
        """Takes away what has been appended after a mark."""


class Adapter:
    """What is special about a kind of models.

    Attributes:
        side_outputs: collects what units give beside what they return.
        masks: the names of arguments that say of each position whether it counts.
    """

    side_outputs: SideOutputs = SideOutputs()
    masks: tuple[str, ...] = ()

    def blocks(self, model: nn.Module) -> Collection[type | str] | None:
        """The classes of units; None: the elements of lists."""
        return None

    def shared(self, model: nn.Module) -> Iterable[object]:
        """Objects that all parts use together, such as a configuration; they are not copied."""
        return ()

    def stand_in(self, stand_in: nn.Module, unit: nn.Module) -> nn.Module:
        """Completes what takes the place of a unit of another part."""
        return stand_in

    def owns_hooks(self, module: nn.Module) -> bool:
        """Whether all hooks of a container are the library's, and right in every part that runs its forward."""
        return False

    def prepare(self, model: nn.Module) -> None:
        """Called before the model is copied."""

    def split(self, sample: dict[str, Any], target: str) -> OwnSplit | None:
        """The function that cuts batches if their rows alone do not say how, in place of `split=` of `attach`.

        Args:
            sample: of `attach`, by names.
            target: the argument that the model's loss needs.
        """
        return None

    def inputs(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with which the forward is called."""
        return arguments, keywords

    def weighs(self, target: str, weight: Callable[[Any], Any] | None) -> None:
        """Called with how the losses of micro-batches are weighed in their mean.

        Args:
            target: the argument of the forward that the loss needs.
            weight: from the target of a micro-batch; None: by its rows.
        """

    def counted(self, target: str, names: Mapping[str, Any]) -> Any:
        """The target of a call without what the loss does not count, for weights; the loss is the same with it.

        Args:
            target: its name.
            names: the arguments of the call by name.
        """
        return names.get(target)

    def mini_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments of a call, of which some may be about the whole mini-batch."""
        return keywords

    def micro_batch(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The same for one micro-batch, in the last part, which computes the loss."""
        return keywords

    def result(self, output: Any) -> Any:
        """What the last part returns of what the forward does."""
        return output

    def form(self, result: Any, keywords: Mapping[str, Any]) -> Any:
        """A result in the form that a call asks for.

        Args:
            result: of the pipe.
            keywords: the arguments of the call by name.
        """
        return result

    def is_generating(self, keywords: Mapping[str, Any]) -> bool:
        """Whether a call is one of many in which the model makes its own next input."""
        return False

    def initialiser(self, model: nn.Module, name: str) -> Callable[[], object] | None:
        """What fills a module that was built on the meta device, after its `reset_parameters()`; None: nothing more.

        Args:
            model: the copy of the model in a part.
            name: of the module in the model.
        """
        return None

    def loss_weight(self, target: Any, result: Any, ask: Callable[..., Any]) -> Callable[[Any], Any] | None:
        """From the target of a micro-batch to how much its loss counts; None: its rows.

        Args:
            target: of a few rows.
            result: what the model returns for them, without values.
            ask: from another target of these rows, and other arguments by name, to what the model returns in a dry
                run, with its graph.
        """
        return None

    def comparable(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments without what makes a loss that is of each micro-batch, or of more, by nature."""
        return keywords
