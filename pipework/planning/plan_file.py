"""Plans as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING, Any, Final

from pipework.planning.certificate import Certificate
from pipework.planning.json_file import read_json
from pipework.planning.profiles.layer_costs import LayerInfo
from pipework.planning.search.candidate import WorkerBytes
from pipework.schedule import Costs, from_json, to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from pipework.planning.plan import Plan

_FORMAT: Final = "pipework plan 1"


def text_of(plan: Plan) -> str:
    """Write a plan."""
    costs = {name: value for name, value in asdict(plan.costs).items() if value is not None}
    workers = [asdict(worker) for worker in plan.workers]
    for worker in workers:
        worker["limit"] = None if worker["limit"] == inf else worker["limit"]
    fields = {
        "format": _FORMAT,
        "devices": list(plan.devices),
        "balance": list(plan.balance),
        "chunks": plan.chunks,
        "batch": plan.batch,
        "optimizer": plan.optimizer,
        "estimated": plan.estimated,
        "notes": list(plan.notes),
        "profile_seconds": plan.profile_seconds,
        "named": dict(plan.named),
        "certificate": asdict(plan.certificate),
        "workers": workers,
        "costs": costs,
        "layers": [list(layer) for layer in plan.layers],
    }
    head = ",\n ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in fields.items())
    return f'{{{head},\n "schedule": {to_json(plan.schedule)}}}\n'


def parse(text: str, name: str, make: Callable[..., Plan]) -> Plan:
    """Read what :func:`text_of` wrote.

    Args:
        text: JSON.
        name: of its file, for messages.
        make: makes it of its attributes.

    Raises:
        ValueError: it is not JSON, or not that of a plan.
    """
    return read_json(text, name, "plan", _FORMAT, "plan.save(path)", lambda fields: make(**_made(fields)))


def _made(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        **fields,
        "devices": tuple(fields["devices"]),
        "balance": tuple(fields["balance"]),
        "notes": tuple(fields["notes"]),
        "certificate": Certificate(**fields["certificate"]),
        "workers": tuple(
            WorkerBytes(**{**each, "limit": inf if each["limit"] is None else each["limit"]})
            for each in fields["workers"]
        ),
        "costs": Costs(**fields["costs"]),
        "layers": tuple(LayerInfo(*each) for each in fields["layers"]),
        "schedule": from_json(json.dumps(fields["schedule"])),
    }
