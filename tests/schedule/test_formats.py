import json

import pytest

from pipework.schedule import (
    SCHEDULES,
    build,
    fill_drain,
    forward_only,
    from_csv,
    from_json,
    to_csv,
    to_json,
    validate,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_skips,
    zb_v,
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip_of_both_forms(name):
    for workers, chunks in ((1, 2), (2, 3), (4, 8)):
        schedule = build(name, workers=workers, chunks=chunks)
        again = from_csv(to_csv(schedule), name=schedule.name)
        assert again == schedule
        lowered = from_csv(to_csv(schedule, form="compute_comms"))
        assert validate(lowered, channel="worker").ok
        assert from_csv(to_csv(lowered, form="compute_comms")) == lowered
        computing = [[action for action in order if action.kind in "FBIW"] for order in lowered.orders]
        assert computing == [list(order) for order in schedule.orders]


def test_waits_are_written_where_pytorch_puts_them_and_not_read():
    assert to_csv(fill_drain(2, 2), form="compute_comms_waits").splitlines() == [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1,0REDUCE_GRAD,0WAIT_REDUCE_GRAD",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,1WAIT_SEND_B0,1WAIT_SEND_B1",
    ]
    for schedule in (fill_drain(2, 2), zb_v(2, 3)):
        waiting, lowered = (to_csv(schedule, form=form) for form in ("compute_comms_waits", "compute_comms"))
        assert from_csv(waiting) == from_csv(lowered)


def test_what_has_been_lowered_is_written_as_it_is():
    lowered = with_communication(with_gradient_reduction(zb_v(2, 3)), channel="pair")
    assert from_csv(to_csv(lowered, form="compute_comms"), name="zb-v") == lowered
    with pytest.raises(ValueError, match="more than computations: choose form='compute_comms'"):
        to_csv(lowered)


def test_what_pytorch_has_no_word_for():
    with pytest.raises(ValueError, match=r"'gpipe' has recomputation, which PyTorch's CSV does not support"):
        to_csv(with_recompute(fill_drain(2, 2), 1))
    with pytest.raises(ValueError, match="has skip connections, which PyTorch's CSV does not support"):
        to_csv(with_skips(fill_drain(3, 2), [(0, 2)]))
    with pytest.raises(ValueError, match="form is 'comms': wanted one of 'compute_only', 'compute_comms'"):
        to_csv(fill_drain(1, 1), form="comms")


def test_idle_cells_spaces_and_windows_line_ends():
    assert from_csv(" 0F0 ,, 0B0,,\r\n,1F0,1B0\r\n\r\n", name="gpipe") == fill_drain(2, 1)


def test_overlap_is_one_after_the_other():
    text = "0F0,(0F1;0B0)OVERLAP_F_B,0B1"
    assert [str(action) for action in from_csv(text).orders[0]] == ["0F0", "0F1", "0B0", "0B1"]


def test_placement_is_where_stages_stand():
    assert from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0").placement == (0, 1, 1, 0)
    assert from_csv(to_csv(forward_only(2, 3)), name="forward-only") == forward_only(2, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "row 1 of the CSV has no action"),
        ("\n,,\n", "row 1 of the CSV has no action"),
        ("0F0,0SEND_F0,0B0", "the CSV makes no schedule: "),
        ("0F0,0X0", r"row 1, column 2 of the CSV: '0X0' is not an action"),
        ("0F0,(0F1;0B)OVERLAP_F_B", r"row 1, column 2 of the CSV: '0B' is not an action"),
        ("0F0,0B0\n,,\n1F0,1B0", "row 2 of the CSV has no action: wanted those of a worker"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action, though stage 2 has"),
        ("0F0,1B0\n1F0,0B0", r"row 2 has 1F0, row 1 has others of this stage"),
        (f"0F0,{'x' * 200_000}", "the text is not CSV: field larger than field limit"),
    ],
)
def test_wrong_csv(text, message):
    with pytest.raises(ValueError, match=message):
        from_csv(text)


def test_a_missing_action_is_named_by_validation():
    violations = validate(from_csv("0F0,0F1,0B0\n1F0,1F1,1B0,1B1")).violations
    assert violations[0].message == "0B1 (or 0I1 and 0W1) is missing in the order of worker 0"


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trip_of_json(name):
    schedule = build(name, workers=3, chunks=4)
    assert from_json(to_json(schedule)) == schedule
    if not schedule.inference:
        everything = with_communication(with_skips(with_recompute(schedule, 2), [(0, schedule.stages - 1)]))
        assert from_json(to_json(everything)) == everything


def change(**fields):
    return json.dumps({**json.loads(to_json(fill_drain(2, 2))), **fields})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the text is not JSON: "),
        ("a.json", "the text is not JSON: "),
        ("[]", "not a schedule of pipework: wanted an object of format 'pipework schedule 1'"),
        (change(format="pipework schedule 2"), "wanted an object of format 'pipework schedule 1'"),
        (change(inference="no"), "the JSON makes no schedule: inference is 'no', wanted a bool"),
        ('{"format": "pipework schedule 1", "inference": false}', "the JSON makes no schedule: it has no 'orders'"),
        (change(orders=None), "the JSON makes no schedule: "),
        (change(orders=[7]), "the JSON makes no schedule: "),
        (change(orders=[["0F0"], [3]]), "the JSON makes no schedule: '3' is not an action"),
        (change(orders=[["0F0"], ["0Y0"]]), "the JSON makes no schedule: '0Y0' is not an action"),
        (change(placement=[0, 5]), "the JSON makes no schedule: stage 1 is placed on worker 5"),
        (change(placement=["0"]), "the JSON makes no schedule: placement of stage 0 is '0': wanted the number"),
        (change(skips=[3]), "the JSON makes no schedule: a skip is 3"),
        (change(name=3), "the JSON makes no schedule: name of a schedule is 3"),
    ],
)
def test_wrong_json(text, message):
    with pytest.raises(ValueError, match=message):
        from_json(text)


@pytest.mark.parametrize(("write", "read"), [(to_csv, from_csv), (to_json, from_json)])
def test_a_byte_order_mark_is_skipped_and_only_text_is_read(write, read, tmp_path):
    assert read("\ufeff" + write(fill_drain(1, 1))).orders == fill_drain(1, 1).orders
    with pytest.raises(TypeError, match=r"the text of a schedule is .*Path.*: wanted a str"):
        read(tmp_path)
