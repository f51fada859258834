import json

import pytest

from pipework.schedule import (
    SCHEDULES,
    build,
    fill_drain,
    from_csv,
    from_json,
    to_csv,
    to_json,
    with_communication,
    with_gradient_reduction,
    with_recompute,
    with_sharding,
    with_skips,
)


@pytest.mark.parametrize("name", SCHEDULES)
def test_round_trips(name):
    for workers, chunks in ((1, 2), (2, 3), (4, 8)):
        schedule = build(name, workers=workers, chunks=chunks)
        assert from_csv(to_csv(schedule), name=schedule.name) == schedule
        assert from_json(to_json(schedule)) == schedule
        if not schedule.inference:
            lowered = with_sharding(with_communication(with_gradient_reduction(schedule)), 1)
            assert from_csv(to_csv(lowered), name=schedule.name) == lowered
            everything = with_communication(with_skips(with_recompute(schedule, 2), [(0, schedule.stages - 1)]))
            assert from_json(to_json(everything)) == everything


def test_what_pytorch_has_no_word_for():
    with pytest.raises(ValueError, match="has skip connections, which PyTorch's CSV does not support"):
        to_csv(with_skips(fill_drain(3, 2), [(0, 2)]))


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        (" 0F0 ,, 0B0,,\r\n,1F0,1B0\r\n\r\n", "0F0,0B0\n1F0,1B0"),  # idle cells, spaces, line ends of Windows
        ("0F0,(0F1;0B0)OVERLAP_F_B,0B1", "0F0,0F1,0B0,0B1"),
        ("0F0,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD", "0F0,0B0,0REDUCE_GRAD"),
        ("0F0,0SEND_F0,0WAIT_SEND_F0\n1RECV_F0,1F0", "0F0,0SEND_F0\n1RECV_F0,1F0"),
    ],
)
def test_what_pytorch_writes_beside_actions(text, plain):
    assert to_csv(from_csv(text)) == plain + "\n"


def test_placement_is_where_stages_stand():
    assert from_csv("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0").placement == (0, 1, 1, 0)


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
