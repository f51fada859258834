import pytest

from pipework.schedule import (
    SCHEDULES,
    build,
    fill_drain,
    forward_only,
    from_csv,
    to_csv,
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
    with pytest.raises(ValueError, match="more than forwards and backwards: choose form='compute_comms'"):
        to_csv(lowered)


def test_what_pytorch_has_no_word_for():
    with pytest.raises(ValueError, match=r"'gpipe' recomputes \(0R0\), which PyTorch's CSV does not support"):
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
        ("", "the CSV is empty: wanted a row of actions"),
        ("\n,,\n", "the CSV is empty"),
        ("x.csv", r"the text is 'x.csv', which looks like the name of a file: pass its content, Path\('x.csv'\)"),
        ("0F0,0SEND_F0,0B0", "the CSV makes no schedule: "),
        ("0F0,0X0", r"row 1, column 2 of the CSV: '0X0' is not an action"),
        ("0F0,(0F1;0B)OVERLAP_F_B", r"row 1, column 2 of the CSV: '0B' is not an action"),
        ("0F0,0B0\n,,\n1F0,1B0", "row 2 of the CSV has no action: wanted those of worker 1"),
        ("0F0,0B0\n2F0,2B0", "stage 1 has no action in the CSV, though stage 2 has"),
        ("0F0,1B0\n1F0,0B0", r"stage 1 is in row 1 of the CSV and, with 1F0, in row 2"),
    ],
)
def test_holes_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        from_csv(text)


def test_a_missing_action_is_named_by_validation():
    violations = validate(from_csv("0F0,0F1,0B0\n1F0,1F1,1B0,1B1")).violations
    assert violations[0].message == "0B1 (or 0I1 and 0W1) is missing in the order of worker 0"
