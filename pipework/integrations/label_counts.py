"""Which labels a model of transformers counts: its loss is asked, with labels that are made for the question.

In a dry run all logits are zeros, so each label that a mean counts adds a gradient of the same size. More labels of the
first row count than of the others, and its share of the gradient says which do. With `v` for a label, `p` for padding
and `.` for what is ignored:

    first row    v v v p p .     of two rows its share is 5/7, and 3/5 if `p` is ignored, too;
    second row   v v . . . .     4/5 and 2/3 if the label at the first position is compared with nothing;
                                 1/2 if all rows count alike, or all labels do
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from transformers.configuration_utils import PreTrainedConfig

_USUAL: Final = -100  # in labels, where a model counts nothing
_CLOSE: Final = 1e-3  # the shares above differ by more


def weight_of_labels(
    model: str, labels: Tensor, logits: Tensor | None, ask: Callable[[Tensor], Any], config: PreTrainedConfig
) -> Callable[[Tensor], Tensor] | None:
    """From the labels of a micro-batch to how many of them its loss is a mean over; None: all rows count alike.

    Args:
        model: its class, as messages call it.
        labels: of a few rows, integers.
        logits: of the model for them, without values.
        ask: from other labels of these rows to what the model returns in a dry run, with its graph.
        config: of the model.

    Raises:
        ValueError: it cannot be told.
    """
    if labels.dim() < 2:
        return functools.partial(counted_labels, is_shifted=False, ignored=(_USUAL,))
    of_config = [value for name, value in vars(config).items() if "ignore_index" in name and isinstance(value, int)]
    pad = getattr(config.get_text_config(), "pad_token_id", None)
    if logits is None or not isinstance(pad, int) or not 0 <= pad < logits.shape[-1]:
        pad = None
    is_alike, failure = False, None
    for number in dict.fromkeys([*of_config, _USUAL]):
        asked = _question(labels if len(labels) > 1 else torch.cat([labels, labels]), number, pad)
        try:
            share = _share_of_first_row(asked, ask, len(labels))
        except Exception as error:
            failure = error
            continue
        for is_shifted in (False, True):
            for ignored in [(number,)] if pad is None else [(number,), (number, pad)]:
                weight = functools.partial(counted_labels, is_shifted=is_shifted, ignored=ignored)
                if abs(float(weight(asked[:1]) / weight(asked)) - share) < _CLOSE:
                    return weight
        is_alike |= abs(1 / len(asked) - share) < _CLOSE
    if is_alike:
        return None
    raise ValueError(
        f"it cannot be told which of the labels, of shape {tuple(labels.shape)}, the loss of this {model} is a mean "
        "over, and the pipe weighs micro-batches by them: give attach loss_weight=, a function from the labels of a "
        "micro-batch to how many of them count, such as lambda labels: (labels[:, 1:] != -100).sum()"
    ) from failure


def counted_labels(labels: Tensor, *, is_shifted: bool, ignored: Sequence[int]) -> Tensor:
    """How many labels count.

    Args:
        labels: of a micro-batch.
        is_shifted: whether position i is compared with label i + 1, so that the first label does not count.
        ignored: the labels that do not count.

    Example:
        >>> counted_labels(torch.tensor([[1, 2, -100]]), is_shifted=True, ignored=[-100])
        tensor(1)
    """
    compared = labels[:, 1:] if is_shifted else labels
    first, *others = ignored
    counts = compared != first
    for each in others:
        counts &= compared != each
    return counts.sum()


def _question(labels: Tensor, ignored: int, pad: int | None) -> Tensor:
    """The labels of the drawing above; as much of them as a row has room for."""
    known = labels[(labels >= 0) & (labels != (-1 if pad is None else pad))]
    label = int(known[0]) if len(known) else int(pad == 0)
    asked = torch.full_like(labels, ignored).flatten(1)
    most = min(3, asked.shape[1])
    asked[:, : most - 1] = label
    asked[0, :most] = label
    if pad is not None and asked.shape[1] >= 5:
        asked[0, 3:5] = pad
    return asked.view_as(labels)


def _share_of_first_row(asked: Tensor, ask: Callable[[Tensor], Any], rows: int) -> float:
    """The share of the labels of the first row in those that count.

    Args:
        asked: labels.
        ask: see above.
        rows: that it takes; if it is one, each row is asked alone, and a label's gradient is one by those that count.

    Raises:
        Exception: it cannot be told: there are no logits of so many rows, or the labels are none of this model.
    """
    if rows == 1:
        first, second = (float(_gradient(row, ask).abs().max()) for row in (asked[:1], asked[1:]))
        return second / (first + second)
    gradient = _gradient(asked, ask).reshape(rows, -1)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    sizes = torch.linalg.vector_norm(gradient, 1, dim=1, dtype=wide)
    return float(sizes[0] / sizes.sum())


def _gradient(asked: Tensor, ask: Callable[[Tensor], Any]) -> Tensor:
    """The gradient of the logits, or of what they are a part of."""
    result = ask(asked)
    loss, edge = result.loss, torch.autograd.graph.get_gradient_edge(result.logits)
    del result  # its logits are as large as the gradient
    (gradient,) = torch.autograd.grad(loss, [edge], allow_unused=True)
    while gradient is None:  # the loss is of more than these logits
        node, number = edge.node.next_functions[0]
        edge = torch.autograd.graph.GradientEdge(node, number)
        (gradient,) = torch.autograd.grad(loss, [edge], allow_unused=True)
    return gradient
