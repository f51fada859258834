"""The arguments of a model's forward, by name or by position."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pipework.model.marks import checked_pieces

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipework.model.marks import OwnSplit, Piece
    from pipework.model.parts.sample import Arguments

OF_PIPE: Final = frozenset({"target", "return_output", "loss_scale", "outputs"})
"""The arguments of a call of a pipe."""


@dataclass(frozen=True)
class ForwardArguments:
    """The arguments of a model's forward, one of which is the target of its loss.

    Attributes:
        signature: of the forward.
        target: the name of the argument that the model's own loss needs; None: it has none.
    """

    signature: inspect.Signature
    target: str | None

    def by_name(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name."""
        bound = self.signature.bind(*arguments, **keywords)
        named = dict(bound.arguments)
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                named.update(named.pop(parameter.name, {}))
        return named

    def argument_of(self, given: Arguments, name: str) -> Any:
        """One of them; None: it is not given."""
        return self.by_name(*given).get(name)

    def with_arguments(self, given: Arguments, values: Mapping[str, Any]) -> Arguments:
        """The arguments with other values, or more of them."""
        arguments, keywords = given
        by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, each in self.signature.parameters.items() if each.kind in by_position][: len(arguments)]
        own = [values.get(name, value) for name, value in zip(names, arguments, strict=False)]
        others = {name: value for name, value in values.items() if name not in names}
        return (*own, *arguments[len(own) :]), {**keywords, **others}

    def by_position(self, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Arguments:
        """The same arguments by position, as far as possible, since a pipe has arguments of its own with their names.

        Raises:
            TypeError: one of these names can be given by name only.
        """
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        named = {name: value for name, value in bound.kwargs.items() if name in keywords}
        if taken := OF_PIPE.intersection(named):
            raise TypeError(
                f"the forward takes {', '.join(map(repr, sorted(taken)))} by name only, and a pipe has arguments of "
                "these names: let the forward take it by position, or rename it"
            )
        return bound.args, named

    def split(
        self, function: OwnSplit, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int
    ) -> list[Piece]:
        """The micro-batches that a function of the user's makes of all arguments but the target, by their names."""
        names = self.by_name(arguments, keywords)
        names.pop(self.target or "", None)
        parts = checked_pieces(function, (), names, target, chunks)
        if target is None or self.target is None:
            return parts
        return [(inputs, {**named, self.target: of}, of) for inputs, named, of in parts]
