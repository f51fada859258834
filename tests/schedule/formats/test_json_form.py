import json

import pytest

from pipework.schedule import (
    SCHEDULES,
    build,
    fill_drain,
    from_json,
    from_orders_text,
    to_json,
    to_orders_text,
    with_communication,
    with_recompute,
    with_skips,
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip(name):
    schedule = build(name, workers=3, chunks=4)
    assert from_json(to_json(schedule)) == schedule


def test_round_trip_of_everything_that_passes_add():
    schedule = with_communication(with_skips(with_recompute(fill_drain(4, 3), 2), [(0, 3)]))
    assert from_json(to_json(schedule)) == schedule
    assert from_orders_text(to_orders_text(schedule)) == schedule


def change(**fields):
    return json.dumps({**json.loads(to_json(fill_drain(2, 2))), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the text is not JSON: "),
        ("[]", "not a schedule of pipework: it is a list, wanted an object of format 'pipework schedule 1'"),
        ("{}", "its format is None"),
        (change(format="pipework schedule 2"), "its format is 'pipework schedule 2', wanted"),
        (change(orders=None), "the JSON has None for 'orders': wanted a list"),
        (change(orders=[["0F0"], [3]]), "the JSON has 3 for an action"),
        (change(orders=[["0F0"], ["0Y0"]]), "'0Y0' is not an action"),
        (change(placement=[0, 5]), "stage 1 is placed on worker 5"),
        (change(orders=[["0F0"], ["0Y0"]]), "the order of worker 1 in the JSON: "),
        (change(orders=[7]), "the JSON has 7 for the order of worker 0: wanted a list"),
        (change(placement=["0"]), "the JSON makes no schedule: placement of stage 0 is '0': wanted the number"),
        (change(placement=[[]]), "the JSON makes no schedule: placement of stage 0"),
        (change(skips=[3]), "the JSON has 3 for a skip: wanted a pair of stages"),
        (change(skips=[[0, "2"]]), "the JSON makes no schedule: a skip is"),
        ("a.json", "the text is 'a.json', which looks like the name of a file"),
        (change(inference="no"), "the JSON has 'no' for 'inference': wanted a bool"),
    ],
)
def test_errors_say_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(text)
