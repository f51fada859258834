"""A Llama of 1.2 billion parameters on a real card, with four micro-batches in flight: with offload and without."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

from benchmarks import harness
from benchmarks.gpu import parts
from benchmarks.gpu.card import Card
from benchmarks.gpu.llama import Llama
from benchmarks.gpu.measure import Measured, Outcome, measure
from benchmarks.gpu.ways import Way
from benchmarks.harness import Verdict
from pipework.schedule import Action, Schedule

IN_FLIGHT, CHUNKS, TOKENS = 4, 12, 1024
STAGES = 9  # eight of two blocks each, and the head
LEFT, SLOWER = 0.4, 1.08  # at most, of the activations' bytes and of the time
QUARTER = "a quarter"


def in_flight(count: int, chunks: int) -> Schedule:
    """One worker with so many micro-batches at a time, as the first of so many workers has them under 1F1B."""
    stages = range(STAGES)
    order: list[Action] = []
    for number in range(chunks + count - 1):
        if number < chunks:
            order += [Action("F", stage, number) for stage in stages]
        if number >= count - 1:
            order += [Action("B", stage, number - count + 1) for stage in reversed(stages)]
    return Schedule(f"{count} in flight", (0,) * STAGES, (tuple(order),))


def run(card: Card, rounds: int, seconds: float) -> tuple[Outcome, list[Verdict]] | None:
    """Lets pipes of one worker take turns, with and without offload, on a quarter of the card and on all of it.

    A quarter of a large card computes about as fast as a card whose link can hide the copies.

    Returns:
        None, and a line of text, without transformers.
    """
    chunks = CHUNKS if card.is_gpu else IN_FLIGHT + 1
    model = Llama.of(card, chunks, TOKENS, blocks=STAGES - 1)
    if model is None:
        return None
    each = model.config.num_hidden_layers // (STAGES - 1)
    options = {"schedule": in_flight(IN_FLIGHT, chunks), "balance": [1 + each, *[each] * (STAGES - 2), 2]}
    places = {QUARTER: [parts.split(4)[0]], "the card": []} if card.is_gpu else {"the CPU": []}
    ways: dict[str, Callable[[], Way | None]] = {}
    for place, on in places.items():
        ways[place] = functools.partial(model.attached, 1, on, **options)
        ways[f"{place}, offload"] = functools.partial(model.attached, 1, on, **options, offload="activations")
    with model.card.device:
        weights = sum(parameter.nbytes for parameter in model.built().parameters()) / 2**30
    outcome = measure(model.case(ways), card, rounds, seconds)
    return outcome, [one for place in places for one in _verdicts(place, outcome.measured, weights, card)]


def _verdicts(place: str, measured: Mapping[str, Measured], weights: float, card: Card) -> list[Verdict]:
    """Activations are what a step holds beside weights and gradients."""
    without, offloaded = measured.get(place), measured.get(f"{place}, offload")
    if without is None or offloaded is None:
        return []
    if not card.is_gpu:
        same = offloaded.difference == 0.0
        return [Verdict(f"{place}: gradients of the pipe with offload", float(not same), 0.0, "that differ")]
    left = (offloaded.gib - 2 * weights) / (without.gib - 2 * weights)
    time = harness.median_ratio(offloaded.seconds, without.seconds)
    found = [Verdict(f"{place}: activations with offload", left, LEFT, "of those without")]
    # The link of a whole card such as an H100 cannot hide the copies: its time is a number of the table.
    return [*found, Verdict(f"{place}: step with offload", time, SLOWER, "x")] if place == QUARTER else found
