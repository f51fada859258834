"""The settings of the loss inside of a pipe, and what is known of its function.

`cross_entropy` divides by the weights of the targets that count, not by rows: over a mini-batch whose micro-batches
have unequal numbers of padded targets, a mean by rows is another one.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self, SupportsFloat

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from pipework import torch_private
from pipework.runtime.device import is_accelerator
from pipework.runtime.stage.loss import InnerLoss, mean_weights
from pipework.signatures import signature_of
from pipework.values import nested

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pipework.runtime.transport import Message

IGNORED: Final = -100  # PyTorch's default, which tokenizers and data collators use, too
_FUNCTIONS: Final = (functional.cross_entropy, functional.nll_loss)
_MODULES: Final = (nn.CrossEntropyLoss, nn.NLLLoss)
_FORWARDS: Final = tuple([module.forward for module in _MODULES])


def unwrapped(function: Any) -> tuple[Any, dict[str, Any], bool]:
    """The function or module inside of partials and compiled wrappers, and what the partials bind.

    Returns:
        The innermost function; the keywords that partials bind, where an outer one's replace those of an inner one; and
        whether partials bind positional arguments, too.

    Example:
        >>> function, keywords, _ = unwrapped(functools.partial(functional.cross_entropy, ignore_index=0))
        >>> function is functional.cross_entropy, keywords
        (True, {'ignore_index': 0})
    """
    keywords: dict[str, Any] = {}
    binds_positions = False
    while True:
        inside = torch_private.uncompiled(function)
        if isinstance(function, functools.partial):
            keywords = {**function.keywords, **keywords}
            binds_positions = binds_positions or bool(function.args)
            inside = function.func
        if inside is function:
            return function, keywords, binds_positions
        function = inside


def may_be_other(function: Any, weight: Any = None) -> bool:
    """Whether a loss may be another mean or sum than the pipe takes it for.

    It is not, if it is a function of PyTorch's, which say what they are, and has no weight of the user's; or if it is a
    model's own, which was compared with the sample.

    Example:
        >>> may_be_other(nn.MSELoss()), may_be_other(nn.functional.l1_loss), may_be_other(lambda output, target: output)
        (False, False, True)
    """
    function, _, _ = unwrapped(function)
    is_own = function is None or hasattr(function, "pipework_source")
    if is_own or weight is not None:
        return not is_own
    if isinstance(function, nn.Module):
        return type(function).__module__ != nn.modules.loss.__name__
    return bool(getattr(function, "__module__", "") != functional.__name__)


def function_identity(function: Any) -> list[Any] | None:
    """The name of a function and its plain settings, as JSON values, which are the same in all processes.

    Of PyTorch's own functions and modules also integers and texts count, such as `ignore_index` and `reduction`. Of
    others only floats that are arguments do: an integer or a text may be the number of a process or its device, another
    attribute may be a time; these differ rightly.

    Args:
        function: a function, a `functools.partial`, or an object that can be called; None gives None.

    Example:
        >>> function_identity(nn.CrossEntropyLoss(label_smoothing=0.1))[1]["label_smoothing"]
        0.1
    """
    if function is None:
        return None
    inner, bound, _ = unwrapped(function)
    named = inner if isinstance(getattr(inner, "__qualname__", None), str) else type(inner)
    settings = bound
    if named is not inner:
        own = getattr(inner, "__dict__", {})
        settings = {name: own[name] for name in signature_of(named.__init__).parameters if name in own} | bound
    kinds = (bool, int, float, str) if str(named.__module__).partition(".")[0] == "torch" else (float,)
    return [named.__qualname__, {name: value for name, value in settings.items() if type(value) in kinds}]


@dataclass(frozen=True)
class CountedTargets:
    """Which targets a loss counts, and how much.

    Attributes:
        ignored: the target that does not count.
        weight: of each class; None: all count alike.
    """

    ignored: int = IGNORED
    weight: Tensor | None = None

    @classmethod
    def of(cls, function: Any) -> Self | None:
        """Of a loss of PyTorch's, compiled or bound as a partial, too; None: it is another function.

        Example:
            >>> CountedTargets.of(nn.CrossEntropyLoss(ignore_index=0))
            CountedTargets(ignored=0, weight=None)
            >>> CountedTargets.of(functional.mse_loss) is None
            True
        """
        function, bound, binds_positions = unwrapped(function)
        if isinstance(function, _MODULES) and type(function).forward in _FORWARDS and not binds_positions:
            return cls(function.ignore_index, function.weight)
        if function not in _FUNCTIONS or binds_positions:
            return None
        return cls(bound.get("ignore_index", IGNORED), bound.get("weight"))

    def amounts(self, targets: Sequence[Any]) -> list[float] | Tensor | None:
        """How much the target of each micro-batch counts; None: rows count, as no numbers of classes are known.

        On an accelerator the numbers stay there, as one tensor, unless classes have weights: these may sum to 0 where
        targets count, and whoever takes the mean must know that beforehand.

        Example:
            >>> CountedTargets().amounts([torch.tensor([1, 2]), torch.tensor([3, -100])])
            [2.0, 1.0]
        """
        if not all(isinstance(each, Tensor) and not each.is_floating_point() and not each.is_meta for each in targets):
            return None
        # On an accelerator each transfer waits: one for all, and nothing here has a size that depends on values.
        # Bytes would wrap around in a comparison with -100.
        flat = [target.flatten().long() for target in targets]
        together = pad_sequence(flat, batch_first=True, padding_value=self.ignored)
        ignored = together == self.ignored
        if self.weight is None:
            counts = (~ignored).sum(1)
            if is_accelerator(counts.device):
                return counts
        else:
            weight = self.weight.to(together.device, torch.promote_types(self.weight.dtype, torch.float32))
            counts = weight[together.masked_fill(ignored, 0)].masked_fill(ignored, 0).sum(1)
        return list(map(float, counts.tolist()))


REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class LossSettings:
    """The arguments of `Pipe` for the loss.

    Attributes:
        loss_fn: computes the loss of a micro-batch from its output and target; None: the last layer returns the loss.
        loss_reduction: 'mean': the loss of a mini-batch is the weighted mean of its micro-batches' losses; 'sum': their
            sum.
        loss_weight: computes a micro-batch's weight in the mean from its target; None: the number of targets that a
            loss of PyTorch's counts (see `CountedTargets`), for other functions the number of rows.
        grad_scaler: scales the gradients inside of the pipe.

    Raises:
        TypeError: a function is not callable, or `grad_scaler` is not a `GradScaler`.
        ValueError: the reduction is unknown, a sum has a weight, or the function has another reduction or parameters.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None = None
    loss_reduction: str = "mean"
    loss_weight: Callable[[Any], Any] | None = None
    grad_scaler: torch.amp.GradScaler | None = None

    def __post_init__(self) -> None:
        for name, value in (("loss_fn", self.loss_fn), ("loss_weight", self.loss_weight)):
            if isinstance(value, type):
                raise TypeError(f"{name} is the class {value.__name__}: write {value.__name__}()")
            if value is not None and not callable(value):
                raise TypeError(f"{name} is {value!r}: wanted a function")
        if self.loss_reduction not in REDUCTIONS:
            raise ValueError(f"loss_reduction is {self.loss_reduction!r}: wanted one of 'mean', 'sum'")
        if self.loss_weight is not None and self.loss_reduction == "sum":
            raise ValueError(
                "loss_weight is for the weights of a mean, but loss_reduction is 'sum': leave one of them out"
            )
        self._refuse_other_reduction()
        if isinstance(self.loss_fn, nn.Module) and next(self.loss_fn.parameters(), None) is not None:
            raise ValueError(
                f"loss_fn ({type(self.loss_fn).__name__}) has parameters, which the pipe would not train: make it the "
                "last layer, which takes the target as its last argument and returns the loss, and leave loss_fn out"
            )
        if self.grad_scaler is not None and not callable(getattr(self.grad_scaler, "get_scale", None)):
            raise TypeError(f"grad_scaler is {self.grad_scaler!r}: wanted a torch.amp.GradScaler")

    def _refuse_other_reduction(self) -> None:
        """Raises a ValueError if the function has another `reduction`: an attribute or argument of PyTorch's losses."""
        function, bound, _ = unwrapped(self.loss_fn)
        own = bound.get("reduction", getattr(function, "reduction", None))
        if own is None and getattr(function, "__module__", "") == nn.functional.__name__:
            parameter = inspect.signature(function).parameters.get("reduction")
            own = None if parameter is None else parameter.default
        if own in ("none", "sum", "mean", "batchmean") and own.removeprefix("batch") != self.loss_reduction:
            raise ValueError(
                f"loss_fn ({getattr(function, '__name__', type(function).__name__)}) has reduction={own!r}, and "
                f"loss_reduction is {self.loss_reduction!r}, by which the pipe joins the losses of its micro-batches: "
                f"make loss_fn with reduction={self.loss_reduction!r}, or give Pipe the loss_reduction that it has"
            )

    def missing_target(
        self, schedule: str, *, call: str, reader: int | None = None, given: Mapping[str, Any]
    ) -> ValueError:
        """The error of a training step without a target, if the first backward comes before the last forward.

        Args:
            schedule: the name of the schedule.
            call: with a target, for the message.
            reader: if workers are processes, the rank that reads the target.
            given: the keyword arguments of the call.
        """
        other = ", but labels=, which is an input by that name" if given.get("labels") is not None else ""
        where = "" if reader is None else f" on every rank; {_not_there(reader)}"
        how = "give Pipe a loss_fn and call" if self.loss_fn is None else "call"
        return ValueError(
            f"schedule {schedule!r} computes the loss inside and got no target{other}: {how} {call}{where}. For "
            "outputs alone use torch.no_grad() or eval(); for a loss outside of the pipe choose schedule='gpipe'"
        )

    def outside_of_one_rank(self, reader: int) -> ValueError:
        """The error of a training step with the loss outside, if only one of several processes gets the outputs.

        Args:
            reader: the rank that reads the target.
        """
        return ValueError(
            f"there is no target ({_not_there(reader)}), so the loss is outside, and every process must compute it: "
            'call pipe(x, outputs="all") and take the same loss there; or call pipe(x, target=y), with a loss_fn'
        )

    def place(self, device: torch.device) -> None:
        """Moves the buffers of a loss function that is a module, such as the weights of classes."""
        if isinstance(self.loss_fn, nn.Module):
            self.loss_fn.to(device)

    def inner(
        self,
        targets: Sequence[Message] | None,
        rows: Sequence[int],
        device: torch.device,
        *,
        grad: bool,
        keeps_output: bool,
        loss_scale: float | Tensor = 1.0,
    ) -> InnerLoss:
        """The loss that the last stage computes for one mini-batch.

        Args:
            targets: of the micro-batches; None: another process has them, and computes the loss.
            rows: of the micro-batches, which weigh their losses; negative where there is no such number.
            device: of the last stage.
            grad: whether gradients are needed.
            keeps_output: whether the output is returned, too.
            loss_scale: of the call, see `checked_scale`.
        """
        weights = None
        if targets is not None and self.loss_reduction == "mean":
            weights = mean_weights(self._amounts(targets, rows))
        if targets is not None and (isinstance(loss_scale, Tensor) or loss_scale != 1.0):
            weights = tuple([weight * loss_scale for weight in weights or (1.0,) * len(rows)])
        factor: float | Tensor = 1.0
        scaler = self.grad_scaler
        if scaler is not None and grad:  # on an accelerator a tensor, for whose value the host does not wait
            factor = scaler.scale(torch.ones((), device=device)) if is_accelerator(device) else scaler.get_scale()
        return InnerLoss(self.loss_fn, weights, factor, keeps_output, len(rows))

    def _amounts(self, targets: Sequence[Message], rows: Sequence[int]) -> Sequence[float] | Tensor:
        """How much each micro-batch weighs; known before the first action, since a backward may come early."""
        if self.loss_weight is None:
            counts = CountedTargets.of(self.loss_fn)
            amounts = None if counts is None else counts.amounts([nested.unflatten(*target) for target in targets])
            if amounts is None and min(rows) < 0:
                shapes = [tuple(tensor.shape) for tensor in targets[rows.index(min(rows))][0]]
                raise ValueError(
                    "rows do not say how much each micro-batch weighs in the mean: inputs and target of a micro-batch "
                    "have different numbers of them, or targets differ in other dimensions, too (a target has the "
                    f"shapes {shapes}). Give the weight, such as loss_weight=torch.numel for a mean over all "
                    "numbers of the targets, or loss_reduction='sum'"
                )
            return rows if amounts is None else amounts
        weights = [self.loss_weight(nested.unflatten(*target)) for target in targets]
        for number, weight in enumerate(weights):
            if not isinstance(weight, SupportsFloat) or getattr(weight, "ndim", 0) != 0:
                got = f"a tensor of shape {tuple(weight.shape)}" if hasattr(weight, "shape") else type(weight).__name__
                raise TypeError(
                    f"loss_weight gave {got} for micro-batch {number}: wanted a finite number of at least 0"
                )
        if all(isinstance(weight, Tensor) for weight in weights):  # on an accelerator the host waits once
            weights = torch.stack(weights).tolist()
        amounts = list(map(float, weights))
        for number, amount in enumerate(amounts):
            if not 0 <= amount < math.inf:
                raise ValueError(
                    f"loss_weight gave {amount} for micro-batch {number}: wanted a finite number of at least 0"
                )
        return amounts

    def padding_warning(self, targets: Sequence[Message], rows: Sequence[int], *, waits: bool = False) -> str | None:
        """A text if targets are padded unequally and the mean does not leave the padding out.

        Args:
            targets: of the micro-batches.
            rows: of the micro-batches.
            waits: whether the host may wait for targets on an accelerator, which are left alone otherwise.
        """
        by_rows = self.loss_reduction == "mean" and self.loss_weight is None and CountedTargets.of(self.loss_fn) is None
        if not by_rows:
            return None
        function, bound, _ = unwrapped(self.loss_fn)
        what, give = "loss_fn is a function of its own", "Give"
        if (own := getattr(function, "pipework_source", None)) is not None:
            what, give = f"{own} is not looked into", "Attach the pipe (after `del model.forward`) with"
        one = bound.get("ignore_index", getattr(function, "ignore_index", IGNORED))
        columns = zip(*(tensors for tensors, _ in targets), strict=False)
        for column, ignored in itertools.product(columns, getattr(function, "left_out", (one,))):
            plain = all(type(each) is torch.Tensor and each.dtype is torch.int64 for each in column)
            if plain and (waits or all(each.is_cpu for each in column)):
                there = torch.cat([each.flatten() for each in column]) == ignored  # once: this is done in each step
                parts = there.split([each.numel() for each in column]) if there.any() else ()
                counts = [int(part.sum()) for part in parts] or [0] * len(column)
                if any(count * rows[0] != counts[0] * own for count, own in zip(counts, rows, strict=True)):
                    return (
                        f"targets have the value {ignored}, which losses leave out of their mean, and micro-batches "
                        f"have unequal numbers of them, but {what}, so the pipe weighs micro-batches by rows. {give} "
                        f"loss_weight=lambda target: (target != {ignored}).sum() for the mean over all targets that "
                        'count; or loss_reduction="sum", if it is a sum'
                    )
        return None


def checked_scale(scale: Any, device: torch.device) -> float | Tensor:
    """The `loss_scale` of a call: a number, or on an accelerator a tensor, for whose value the host does not wait.

    Args:
        scale: given by the caller; None: 1.
        device: of the last stage.

    Raises:
        ValueError: it is no positive number.

    Example:
        >>> checked_scale(torch.tensor(0.125), torch.device("cpu"))
        0.125
    """
    if scale is None:
        return 1.0
    trains = getattr(scale, "requires_grad", False)
    if isinstance(scale, SupportsFloat) and scale is not True and getattr(scale, "ndim", 0) == 0 and not trains:
        if isinstance(scale, Tensor) and is_accelerator(scale.device) and is_accelerator(device):
            return scale.to(device, torch.float32)
        if 0.0 < float(scale) < math.inf:
            return float(scale)
    raise ValueError(f"loss_scale is {scale!r}: wanted a positive number, or a 0-dimensional tensor that has no graph")


def _not_there(rank: int) -> str:
    """The place where the target is missing, if workers are processes."""
    return f"it is read on rank {rank}, where pipe.is_last, and it was None there"
