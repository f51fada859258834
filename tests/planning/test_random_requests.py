"""Random profiles, devices and limits: each gives a plan that holds what it says, or a sentence why none fits.

Sizes are small and often zero, layers and kinds of device are missing or alike, links are left out: what no one would
write by hand.
"""

import random
import re
from itertools import combinations, combinations_with_replacement
from typing import Any

import pytest

from pipework.planning.layer_costs import DeviceKind, LayerBytes, LayerInfo, LayerSeconds, LinkSpeed, SkipBytes
from pipework.planning.plan import Plan
from pipework.planning.profiles import Profile
from pipework.planning.search import plan_profile
from pipework.schedule import validate

SCHEDULES = ["gpipe", "1f1b", "zb-h1", "zb-v", "interleaved-1f1b", "v-half", "v-min", "dualpipe-v", "hanayo"]
REFUSALS = re.compile(
    r"no plan fits: .* it fits with memory=|there are \d devices and|chunks is \d+, and|"
    r"have several stages for each worker"
)
SEEDS = 20  # of a group
GROUPS = [0, *(pytest.param(each, marks=pytest.mark.thorough) for each in range(1, 8))]


def random_profile(draw: random.Random) -> Profile:
    layers, batch = draw.randrange(1, 14), draw.choice([1, 2, 3, 7, 8, 16, 30, 64])
    rows = sorted({draw.randrange(1, batch + 1) for _ in range(draw.randrange(1, 4))})
    kinds = [f"k{number}" for number in range(draw.randrange(1, 4))]
    pairs = list(combinations(range(layers), 2))
    return Profile(
        batch,
        tuple(rows),
        tuple(random_layer(draw, str(number)) for number in range(layers)),
        tuple(tuple(random_bytes(draw, count) for _ in range(layers)) for count in rows),
        {kind: random_kind(draw, rows, layers) for kind in kinds},
        {},
        {
            pair: LinkSpeed(draw.choice([0, 0.01, 1]), draw.choice([1e15, 100.0]))
            for pair in combinations_with_replacement(kinds, 2)
            if draw.random() < 0.8
        },
        tuple(
            SkipBytes(*pair, tuple(draw.randrange(100) for _ in rows))
            for pair in draw.sample(pairs, min(len(pairs), draw.randrange(3)))
        ),
    )


def random_layer(draw: random.Random, name: str) -> LayerInfo:
    weights = draw.choice([0, 100, 1000, 100_000])
    return LayerInfo(name, "Linear", weights, weights if draw.random() < 0.8 else 0, draw.choice([0, 10]))


def random_bytes(draw: random.Random, rows: int) -> LayerBytes:
    sizes = [draw.randrange(most) * rows for most in (50, 300, 20, 50, 300, 100)]
    return LayerBytes(*sizes, draw.randrange(2))


def random_kind(draw: random.Random, rows: list[int], layers: int) -> DeviceKind:
    slowness, idle = draw.choice([0.2, 1, 1, 3]), draw.random() < 0.1

    def seconds(count: int) -> float:
        return 0.0 if idle or draw.random() < 0.1 else draw.random() * count * slowness

    times = tuple(
        tuple(LayerSeconds(seconds(count), seconds(count), seconds(count)) for _ in range(layers)) for count in rows
    )
    return DeviceKind(times, draw.choice([None, None, 10**6]))


def random_options(draw: random.Random, profile: Profile) -> dict[str, Any]:
    devices = [draw.choice(list(profile.kinds)) for _ in range(draw.randrange(1, 6))]
    memory = {device: draw.randrange(1000, 400_000) for device in devices}
    return {
        "devices": devices,
        "memory": draw.choice([None, None, draw.randrange(100, 400_000), memory]),
        "iterations": draw.choice([1, 5, 30]),
        "optimizer": draw.choice([0, 2.0]),
        "chunks": draw.randrange(1, profile.batch + 1) if draw.random() < 0.3 else None,
        "schedules": draw.sample(SCHEDULES, 2) if draw.random() < 0.3 else None,
    }


def check(plan: Plan, profile: Profile, schedules: list[str] | None) -> None:
    assert schedules is None or {*plan.named} <= {*schedules}
    assert all(worker.fits for worker in plan.workers)
    assert sum(plan.balance) == len(profile.layers)
    validate(plan.schedule, plan.costs)
    least = plan.seconds * (1 + 1e-9)
    assert plan.bound <= least
    assert all(plan.seconds <= seconds * (1 + 1e-9) for seconds in plan.named.values())
    assert Plan.from_json(plan.to_json(), "plan.json") == plan
    assert str(plan)
    assert plan._repr_svg_()


@pytest.mark.parametrize("group", GROUPS)
def test_random_requests(group: int) -> None:
    planned = 0
    for seed in range(group * SEEDS, (group + 1) * SEEDS):
        draw = random.Random(seed)
        profile = random_profile(draw)
        options = random_options(draw, profile)
        try:
            plan = plan_profile(profile, progress=lambda line: None, **options)
        except ValueError as error:
            if REFUSALS.search(str(error)):
                continue
            raise AssertionError(f"seed {seed} is refused with other words") from error
        planned += 1
        check(plan, profile, options["schedules"])
        assert plan_profile(profile, progress=lambda line: None, **options) == plan, seed
    assert planned
