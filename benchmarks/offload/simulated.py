"""Steps of large models on two cards that are not here: their times and bytes, by the rates of the cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf
from typing import Any

import torch

import pipework
import pipework.planning
from benchmarks import harness
from benchmarks.offload.model import Config, loss_of
from pipework import Plan
from pipework.planning import LinkSpeed, Profile, Rates
from pipework.schedule import build, simulate, with_offload, with_recompute

CARD = "4090"
# Matrix products reach 80 TFLOP/s, 48% of the 165 of the data sheet (bfloat16, sums in float32); memory and links as
# they are. A card has 24 GiB; what is between 24 GB and that is left to CUDA.
RATES = Rates(operations=80e12, bytes_per_second=1.008e12, memory=24 * 10**9, host_bytes_per_second=25e9)
BETWEEN = LinkSpeed(20e-6, 25e9)  # the cards have no link but the one to the host
MEMORY = "24GB"
ADAM = 2  # numbers for each parameter


@dataclass(frozen=True)
class Choice:
    """How a step is made to fit.

    Attributes:
        schedule: its name.
        stages: of each card.
        checkpoint: see `Pipe`.
        keep: how many micro-batches of a stage stay on the card; None: all.
        optimizer: numbers that the optimizer keeps on the card for each trained one; 0: they are in host memory.
    """

    schedule: str
    stages: int = 1
    checkpoint: str = "never"
    keep: int | None = None
    optimizer: int = ADAM

    def __str__(self) -> str:
        parts = [self.schedule, f"{self.stages} stages a card"] if self.stages > 1 else [self.schedule]
        if self.checkpoint != "never":
            parts.append(f"checkpoint={self.checkpoint}")
        if self.keep is not None:
            parts.append(f"offload={self.keep or 'activations'}")
        if self.optimizer == 0:
            parts.append("HostOptimizer")
        return ", ".join(parts)


@dataclass(frozen=True)
class Step:
    """A simulated step.

    Attributes:
        name: what was chosen.
        seconds: of the step.
        of_ideal: its time divided by that without a bubble, transfers and recomputation.
        exposed: the seconds that copies to and from the host add.
        cards: the most bytes on each card.
        host: the most bytes in the memory of the host.
        fits: whether each card holds its bytes.
    """

    name: str
    seconds: float
    of_ideal: float
    exposed: float
    cards: tuple[float, ...]
    host: float
    fits: bool


def choices(config: Config, many: Sequence[int]) -> list[Choice]:
    """All that are compared; `many` are numbers of stages of a card."""
    found = [Choice("1f1b", 1, checkpoint) for checkpoint in ("never", "except_last", "always")]
    found += [Choice("1f1b", keep=keep) for keep in (1, 2)]
    for stages in many:
        interleaved = Choice("interleaved-1f1b", stages)
        found += [interleaved, replace(interleaved, checkpoint="always")]
        found += [replace(interleaved, keep=keep) for keep in (0, 1, 2)]
    return [replace(each, optimizer=kept) for kept in optimizers(config) for each in found]


def optimizers(config: Config) -> tuple[int, ...]:
    """Where all weights are trained, AdamW's numbers are on the cards or in host memory; those of adapters are few."""
    return (ADAM, 0) if config.rank is None else (ADAM,)


def profile_of(config: Config, tokens: int, rows: int) -> Profile:
    """Of the whole model, from an embedding, a block and a head: all blocks are alike.

    Weights of fewer bits take fewer bytes; the time to make matrices of them is not counted.
    """
    batch = torch.empty(rows, tokens, dtype=torch.long, device="meta")
    alone = pipework.planning.profile(
        replace(config, blocks=1).layers(), batch, target=batch, loss_fn=loss_of, rates={CARD: RATES}, rows=[1]
    )

    def repeated(layers: Sequence[Any]) -> tuple[Any, ...]:
        first, block, last = layers
        return (first, *[block] * config.blocks, last)

    kind, (first, block, last) = alone.kinds[CARD], alone.layers
    block = block._replace(weights=round((block.weights - block.trained) * config.share) + block.trained)
    return replace(
        alone,
        layers=tuple(each._replace(name=f"{n}") for n, each in enumerate(repeated((first, block, last)))),
        bytes=tuple(map(repeated, alone.bytes)),
        kinds={CARD: replace(kind, seconds=tuple(map(repeated, kind.seconds)))},
        links={(CARD, CARD): BETWEEN},
    )


def ideal(profile: Profile, cards: int) -> float:
    """The seconds of a step whose cards always compute, and nothing twice."""
    return sum(map(sum, profile.at(1).seconds[CARD])) * profile.batch / cards


def even_balance(seconds: Sequence[float], stages: int) -> list[int]:
    """The layers of each stage: the sum of the squares of the stages' times is the smallest."""
    ends = list(accumulate(seconds, initial=0.0))
    best = [(0.0, list[int]())] + [(inf, list[int]())] * len(seconds)  # for so many layers
    for _ in range(stages):
        cuts = [
            min(((best[first][0] + (ends[last] - ends[first]) ** 2, first) for first in range(last)), default=(inf, 0))
            for last in range(len(ends))
        ]
        best = [(cost, [*best[first][1], last - first]) for last, (cost, first) in enumerate(cuts)]
    return best[-1][1]


def step_of(profile: Profile, choice: Choice, cards: int) -> Step:
    """One micro-batch for each row."""
    chunks, stages = profile.batch, cards * choice.stages
    balance = even_balance([sum(each) for each in profile.at(1).seconds[CARD]], stages)
    schedule = build(choice.schedule, workers=cards, chunks=chunks, stages_per_worker=choice.stages)
    again = {"never": 0, "except_last": chunks - 1, "always": chunks}[choice.checkpoint]
    schedule = with_recompute(schedule, again)
    settings: dict[str, Any] = {"balance": balance, "chunks": chunks, "checkpoint": "never", "memory": MEMORY}
    settings["optimizer"] = choice.optimizer
    plain = profile.predict([CARD] * cards, schedule=schedule, **settings)
    if choice.keep is None:
        return described(str(choice), plain, profile, choice.optimizer)
    schedule = with_offload(schedule, plain.costs, keep=choice.keep)
    found = profile.predict([CARD] * cards, schedule=schedule, **settings)
    return described(str(choice), found, profile, choice.optimizer)


def planned(profile: Profile, cards: int, iterations: int, optimizer: int) -> Step | None:
    """What the planner chooses for these cards; None: it finds nothing that fits."""
    options: dict[str, Any] = {"memory": MEMORY, "chunks": profile.batch, "progress": lambda line: None}
    options["optimizer"] = optimizer
    try:
        plan = pipework.plan(profile, devices=[CARD] * cards, iterations=iterations, **options)
    except ValueError:
        return None
    stages = plan.schedule.stages // cards
    name = f"plan: {plan.schedule.name}, {stages} stages a card"
    return described(name if optimizer else f"{name}, HostOptimizer", plan, profile, optimizer)


def described(name: str, plan: Plan, profile: Profile, optimizer: int) -> Step:
    """What a plan costs, without the time of the optimizer's step."""
    free = simulate(plan.schedule, replace(plan.costs, offload=0.0, reload=0.0))
    return Step(
        name,
        plan.seconds,
        plan.seconds / ideal(profile, len(plan.workers)),
        plan.seconds - free.makespan,
        tuple(each.total for each in plan.workers),
        sum(each.host for each in plan.workers) + (ADAM - optimizer) * sum(each.trained for each in profile.layers),
        all(each.fits for each in plan.workers),
    )


def report(model: str, steps: Sequence[Step]) -> None:
    """Prints the table of a model."""
    print(f"\n{model}: simulated\n")
    header = ["", "s", "of ideal", "exposed, s", "card 0, GB", "card 1, GB", "host, GB", "fits"]
    rows = [
        [
            each.name, f"{each.seconds:.2f}", f"{each.of_ideal:.2f}", f"{each.exposed:.2f}",
            *(f"{size / 1e9:.1f}" for size in each.cards), f"{each.host / 1e9:.1f}", "yes" if each.fits else "no",
        ]
        for each in steps
    ]  # fmt: skip
    harness.print_table(header, rows)
