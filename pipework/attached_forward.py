"""The forward of a model to which a pipe is attached."""

from __future__ import annotations

import copy
import inspect
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor, nn

from pipework.model.marks import checked_pieces
from pipework.model.parts.following import Following
from pipework.model.parts.part import Part
from pipework.model.parts.sample import LossPlace
from pipework.runtime.program import Program
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipework.model.marks import OwnSplit, Piece
    from pipework.model.parts.cut import Cuttable
    from pipework.pipe import Pipe

_OF_PIPE: Final = frozenset({"target", "return_output", "loss_scale", "outputs"})  # arguments of a call of a pipe


class LossOf:
    """The loss function of the pipe: the model has computed it."""

    def __init__(self, place: LossPlace) -> None:
        self._place = place

    def __call__(self, result: Any, target: Any) -> Tensor:
        """The loss of a result."""
        loss: Tensor = place_in(result, self._place).read(result)
        return loss


def place_in(result: Any, usual: LossPlace) -> LossPlace:
    """Where the loss is in a result; a forward may return a tuple if it is asked for one."""
    return usual if usual.key is None or not isinstance(result, tuple) else LossPlace(0)


class AttachedModel:
    """A model to which a pipe is attached; the pipe knows it, and it does not know the pipe.

    Args:
        model: the model.
        pipe: attached to it.
        cuttable: of the model.
        signature: of its forward.
        target: the argument that the loss needs.
    """

    def __init__(
        self, model: nn.Module, pipe: Pipe, cuttable: Cuttable, signature: inspect.Signature, target: str
    ) -> None:
        self.model = model
        self.adapter = cuttable.adapter
        self.target = target
        self.signature = signature
        self.containers = frozenset(cuttable.containers.values())  # each part has a copy of them
        parts = [layer for layer in pipe if isinstance(layer, Part)]
        self._following = Following(cuttable, parts, is_whole=len(pipe) == sum(pipe.balance))

    def call_of(
        self, pipe: Pipe, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Makes the pipe as the model is now.

        Returns:
            What the pipe is called with for these arguments of the model, and these by name.
        """
        keywords = self.adapter.mini_batch(keywords)
        if not _OF_PIPE.isdisjoint(keywords):
            arguments, keywords = _positional(self.signature, arguments, keywords)
        self._following.update()
        pipe.training = self.model.training
        return arguments, keywords, by_name(self.signature, arguments, keywords)


class AttachedForward:
    """The forward of a model to which a pipe is attached."""

    def __init__(
        self,
        attached: AttachedModel,
        pipe: Pipe,
        cuttable: Cuttable,
        place: LossPlace,
        outputs: Literal["last", "all"],
    ) -> None:
        self._attached = attached
        self._pipe = pipe
        self._place = place
        self._outputs = outputs
        self._form = nested.replaced(cuttable.result, Tensor, lambda tensor: None)
        self.__signature__ = attached.signature
        self._outside: dict[int, bool] = {}  # by the number of chunks, whether the schedule lets the loss be outside

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What the model returns for a batch; in training with the loss alone."""
        attached, pipe = self._attached, self._pipe
        model, target = attached.model, attached.target
        if arguments and arguments[0] is model:  # Accelerate binds what it takes out of its wrapper again
            arguments = arguments[1:]
        if attached.adapter.is_generating(keywords):
            self._refuse_to_generate()
            return type(model).forward(model, *arguments, **keywords)
        scale = None if "loss_scale" in self.__signature__.parameters else keywords.pop("loss_scale", None)
        arguments, keywords, names = attached.call_of(pipe, arguments, keywords)
        labels = names.get(target)
        trains = model.training and torch.is_grad_enabled()
        if labels is None:
            if trains and not self._loss_may_be_outside():
                raise ValueError(
                    f"{type(model).__name__} was called in training without {target!r}, and the pipe computes "
                    f"the loss inside: give {target}=, or call the model in eval() or under torch.no_grad(); a "
                    "loss of your own, of what the model returns, needs attach(..., schedule='gpipe')"
                )
            return pipe(*arguments, **keywords, loss_scale=scale, outputs=self._outputs)
        options = {"return_output": not trains, "loss_scale": scale, "outputs": self._outputs}
        got = pipe(*arguments, **keywords, target=labels, **options)
        loss, result = (got, None) if trains else got
        if result is None:
            form = attached.adapter.form(copy.copy(self._form), names)
            return place_in(form, self._place).put(loss, form)
        return place_in(result, self._place).put(loss, result)

    def _loss_may_be_outside(self) -> bool:
        chunks = self._pipe.chunks
        if chunks not in self._outside:
            self._outside[chunks] = Program(self._pipe.schedule()).loss_may_be_outside
        return self._outside[chunks]

    def _refuse_to_generate(self) -> None:
        """Raises a RuntimeError if other processes have some of the units: with a cache the model runs by itself."""
        pipe, name = self._pipe, type(self._attached.model).__name__
        if len(pipe) < sum(pipe.balance):
            raise RuntimeError(
                f"{name} was called with a cache, as generate() does, which needs all layers in one process, and this "
                f"one has {len(pipe)} of {sum(pipe.balance)} stages: write the model with "
                "pipework.save_pretrained(pipe, folder) on all ranks, and generate with from_pretrained(folder); or "
                "call generate(..., use_cache=False) on all ranks, which runs in the pipe"
            )


class Placed:
    """In place of the method `to` of a model whose layers are in several processes.

    Args:
        model: to which a pipe is attached.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __call__(self, *arguments: Any, **keywords: Any) -> nn.Module:
        """Moves what can be moved.

        Raises:
            RuntimeError: layers of other processes have no values here.
        """
        try:
            return type(self._model).to(self._model, *arguments, **keywords)
        except NotImplementedError:
            raise RuntimeError(
                f"layers of this {type(self._model).__name__} are in other processes, and it cannot be moved: the pipe "
                "has placed it. transformers' Trainer and Accelerate would move it: train with "
                "pipework.integrations.trainer.PipeTrainer, or leave the model out of accelerator.prepare()"
            ) from None


class SplitByName:
    """The function of `split=` for a model: it gets all arguments but the target by their names.

    Args:
        function: the caller's.
        signature: of the model's forward.
        target: the argument that the loss needs.
    """

    def __init__(self, function: OwnSplit, signature: inspect.Signature, target: str) -> None:
        self._function = function
        self._signature = signature
        self._target = target

    def __call__(self, arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any, chunks: int) -> list[Piece]:
        """The micro-batches, each with its target among its arguments."""
        names = by_name(self._signature, arguments, keywords)
        names.pop(self._target, None)
        parts = checked_pieces(self._function, (), names, target, chunks)
        if target is None:
            return parts
        return [(inputs, {**named, self._target: of}, of) for inputs, named, of in parts]


def _positional(
    signature: inspect.Signature, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments by position, as far as possible, since a pipe has arguments of its own with their names.

    Raises:
        TypeError: one of these names can be given by name only.
    """
    bound = signature.bind(*arguments, **keywords)
    bound.apply_defaults()
    named = {name: value for name, value in bound.kwargs.items() if name in keywords}
    if taken := _OF_PIPE.intersection(named):
        raise TypeError(
            f"the forward takes {', '.join(map(repr, sorted(taken)))} by name only, and a pipe has arguments of these "
            "names: let the forward take it by position, or rename it"
        )
    return bound.args, named


def with_argument(
    signature: inspect.Signature, arguments: tuple[Any, ...], keywords: Mapping[str, Any], name: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the forward with another value for one of them."""
    if name in keywords:
        return arguments, {**keywords, name: value}
    place = [*signature.parameters].index(name)
    return (*arguments[:place], value, *arguments[place + 1 :]), {**keywords}


def by_name(signature: inspect.Signature, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the forward by name."""
    bound = signature.bind(*arguments, **keywords)
    named = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            named.update(named.pop(parameter.name, {}))
    return named
