"""Behaviour that all readers of schedules share."""

import pytest

from pipework.schedule import fill_drain, from_csv, from_json, from_orders_text, to_csv, to_json, to_orders_text

FORMS = [(to_csv, from_csv), (to_json, from_json), (to_orders_text, from_orders_text)]


@pytest.mark.parametrize(("write", "read"), FORMS)
def test_a_byte_order_mark_is_skipped(write, read):
    assert read("\ufeff" + write(fill_drain(1, 1))).orders == fill_drain(1, 1).orders


def test_only_text_is_read(tmp_path):
    for read in (from_csv, from_json, from_orders_text):
        with pytest.raises(TypeError, match=r"the text of a schedule is .*Path.*: wanted a str"):
            read(tmp_path)
