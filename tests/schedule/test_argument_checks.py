"""Every mistake in an argument is told in a sentence: what was got, and what was wanted."""

import pytest

from pipework.schedule import (
    SCHEDULES,
    Action,
    Costs,
    build,
    check,
    compare,
    fill_drain,
    list_schedule,
    lower_bound,
    simulate,
    validate,
    with_communication,
)

PIPE = fill_drain(2, 2)
F0, B0, F1, B1 = (Action(kind, stage, 0) for stage in (0, 1) for kind in "FB")


@pytest.mark.parametrize("value", [0, -3, True, 2.0, "2", None])
@pytest.mark.parametrize("name", SCHEDULES)
def test_generators_want_counts(name, value):
    spec = SCHEDULES[name]
    for place, what in enumerate(
        ("workers", "micro_batches", "stages_per_worker")[: 3 if spec.any_stages_per_worker else 2]
    ):
        sizes = [2, 2, 2][: 3 if spec.any_stages_per_worker else 2]
        sizes[place] = value
        error = ValueError if type(value) is int else TypeError
        with pytest.raises(error, match=rf"^{what} is .*: wanted an integer of at least 1"):
            spec.generator(*sizes)


@pytest.mark.parametrize(
    "function",
    [
        lambda costs: simulate(PIPE, costs),
        lambda costs: validate(PIPE, costs),
        lambda costs: check(PIPE, costs),
        lambda costs: with_communication(PIPE, costs),
        lambda costs: compare(workers=2, chunks=2, costs=costs),
        lambda costs: lower_bound((0, 1), 2, costs),
        lambda costs: build("zb-v", workers=2, chunks=2, costs=costs),
    ],
)
@pytest.mark.parametrize("costs", [2, "forward=1", {"forward": 1}, (1, 2)])
def test_costs_are_costs(function, costs):
    with pytest.raises(TypeError, match=r"^costs is .*: wanted Costs"):
        function(costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 1), [[F0, B0]], 1), "there are priorities for 1 workers, but the placement has 2"),
        (((), [], 1), "there are priorities for 0 workers, but the placement has 0"),
        (
            ((0, 1), [[F0, B0], [F1]], 1),
            "of worker 1 are for other actions than its own: wanted F, and B or I, of .*[1]",
        ),
        (
            ((0, 1), [[F0, B0, F1], [F1, B1]], 1),
            "of worker 0 are for other actions than its own: wanted F, .* stages .0.",
        ),
        (((0,), [[F0, B0]], 0), "limit is 0: wanted an integer of at least 1"),
        (
            ((0,), [[F0, B0]], 1, Costs(forward=[1, 2])),
            "Costs: forward has 2 numbers: wanted 1, one for each stage, or",
        ),
    ],
)
def test_what_a_list_schedule_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        list_schedule(*arguments)
    with pytest.raises(ValueError, match="overtaking is 'some': wanted one of 'none', 'backwards', 'all'"):
        list_schedule((0,), [[F0, B0]], 1, overtaking="some")
