"""Profiles from measurements of single layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from pipework.assignment.from_plan import layer_infos
from pipework.model.sequential import named_layers
from pipework.planning.prediction.grouped import grouped
from pipework.planning.profiles.layer_costs import DeviceKind, LayerBytes, SkipBytes
from pipework.planning.profiles.profile import Profile
from pipework.skip.layout import skip_edges

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pipework.planning.prediction.stage_copy import Measured
    from pipework.planning.profiling.micro_batches import SampleBatch


def profile_of(
    module: nn.Sequential,
    batch: SampleBatch,
    rows: tuple[int, ...],
    measured: Sequence[Sequence[Measured]],
    kinds: Mapping[str, DeviceKind],
) -> Profile:
    """The profile of a module, without names of devices and without links.

    Args:
        module: the layers.
        batch: the mini-batch.
        rows: the sizes of micro-batches that were measured.
        measured: for each of them, each layer's measurement, of which the bytes count.
        kinds: the times.
    """
    return Profile(
        batch=batch.rows,
        rows=rows,
        layers=tuple(layer_infos(module)),
        bytes=tuple(tuple(map(_bytes, row)) for row in measured),
        kinds=kinds,
        skips=_skips(module, measured),
        loss_inside=batch.target is not None,
    )


def alone(module: nn.Sequential) -> list[nn.Sequential]:
    """Each layer as a stage of its own.

    Example:
        >>> len(alone(nn.Sequential(nn.ReLU(), nn.ReLU())))
        2
    """
    return grouped(named_layers(module), [1] * len(module))


def seconds_of(measured: Measured) -> tuple[float, float, float]:
    """Those of F, I and W."""
    return measured.forward, measured.first_half, measured.second_half


def ignored(line: str) -> None:
    """For reports that nobody wants."""


def _bytes(measured: Measured) -> LayerBytes:
    actions = measured.actions
    needs = (
        actions.forward.most - actions.kept_with_output,
        *(each.most + actions.returned for each in actions.backward),
        *(each.most for each in actions.weight),
    )
    return LayerBytes(
        input=actions.given,
        kept=actions.kept,
        output_kept=actions.kept_with_output - actions.kept,
        output=measured.message,
        waiting=actions.waiting + actions.given * actions.waits_for_input,
        temporary=max(0, *needs),
        saves_input=int(actions.saves_input),
    )


def _skips(module: nn.Sequential, measured: Sequence[Sequence[Measured]]) -> tuple[SkipBytes, ...]:
    return tuple(
        SkipBytes(
            edge.source,
            target,
            tuple(row[edge.source].actions.stashed.get(edge.key, (0, 0))[0] for row in measured),
        )
        for edge in skip_edges(alone(module))
        for target in edge.destinations
    )
