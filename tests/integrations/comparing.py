"""A model with a pipe attached beside the same model run micro-batch by micro-batch."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipework import Pipe
from pipework.integrations import adapter_for
from pipework.model.marks import MIXED
from pipework.model.parts.cut import Cuttable
from pipework.model.parts.outputs import tensors_by_name
from tests.model.parts.harness import plain_step

Batch = Mapping[str, Any]


def without_randomness(model: nn.Module) -> nn.Module:
    """The model with each probability of a dropout, or of a mask over its inputs, at zero."""
    configs = [module.config for module in model.modules() if hasattr(module, "config")]
    configs += [each for config in configs for each in vars(config).values() if hasattr(each, "to_dict")]
    for each in (*model.modules(), *configs):
        for name, value in list(vars(each).items()):
            if isinstance(value, float) and re.search(r"drop|^mask_.*_prob$", name):
                setattr(each, name, 0.0)
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = 0.0
        if isinstance(getattr(each, "apply_spec_augment", None), bool):
            each.apply_spec_augment = False
    return model


def tokens(labels: Tensor) -> Tensor:
    """The number of labels that count where each is compared with the logits of its own position."""
    return (labels != -100).sum()


def next_tokens(labels: Tensor) -> Tensor:
    """The number of labels that count where each is compared with the logits of the position before it."""
    return (labels[:, 1:] != -100).sum()


def rows(labels: Tensor) -> Tensor:
    """The number of rows."""
    return torch.tensor(len(labels))


def plain_backward(model: nn.Module, batch: Batch, weight: Callable[[Tensor], Tensor], chunks: int) -> Tensor:
    """Forward and backward of the model itself for each micro-batch in turn; the weighted mean of their losses."""
    return plain_step(model, {**batch, **without_cache(model)}, chunks, weight)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """The argument with which a pipe leaves out the cache: models in training warn about it, and it changes layouts."""
    return adapter_for(model).inputs((), {})[1]


@dataclass(frozen=True)
class Differences:
    """Where two models have other gradients.

    Attributes:
        names: of the parameters.
        worst: the largest difference, relative to the largest element of the parameter's gradient; of a gradient that
            is nearly zero everywhere, relative to a thousandth of the model's largest.
    """

    names: tuple[str, ...]
    worst: float


def differences(model: nn.Module, reference: nn.Module) -> Differences:
    """Compares all gradients bitwise. A gradient that is missing equals zeros."""
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    largest = max(
        (float(grad.abs().max()) for grad in expected.values() if grad is not None and grad.numel()), default=1
    )
    names, worst = [], 0.0
    for name, parameter in model.named_parameters():
        got, wanted = (
            torch.zeros_like(parameter) if grad is None else grad for grad in (parameter.grad, expected[name])
        )
        if not torch.equal(got, wanted):
            scale = max(float(wanted.abs().max()), 1e-3 * largest)
            difference = float((got - wanted).abs().max()) / scale if scale else float("inf")
            names.append(name)
            worst = max(worst, difference if difference == difference else float("inf"))
    return Differences(tuple(names), worst)


def returns_all(output: Any, parts: Sequence[Any], pipe: Pipe) -> bool:
    """Whether an output has all that the model returns for micro-batches, joined, but for numbers and what is mixed."""
    dims, found = pipe._executor.layout.outputs, tensors_by_name(output)
    if dims is None:  # as where a library's own function cuts, and joins along rows
        assert pipe._executor.settings.split is not None
        dims = defaultdict(int)
    columns: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, tensor in tensors_by_name(part).items():
            columns.setdefault(name, []).append(tensor)
    expected = {
        name: torch.cat(column, dims[name])
        for name, column in columns.items()
        if column[0].dim() and dims[name] != MIXED
    }
    assert found.keys() >= expected.keys(), found.keys() ^ expected.keys()
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def joined(outputs: Sequence[Any]) -> Any:
    """Logits of micro-batches as those of a mini-batch."""
    return torch.cat([output.logits for output in outputs])


def units_of(model: nn.Module, sample: Batch) -> int:
    """How many groups of units a model has."""
    return len(Cuttable(model, sample, blocks=None, adapter=adapter_for(model)).groups)
