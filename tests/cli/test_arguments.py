import argparse
import json

import pytest

from pipework.cli.arguments import costs, read_schedule, written_costs
from pipework.schedule import Costs, fill_drain, to_csv, to_json


def test_short_and_long_names_of_costs():
    assert written_costs("F=2,B=3, I=1,W=2,R=4,c=.5,A=6") == Costs(
        forward=2, backward=3, input_gradient=1, weight_gradient=2, recompute=4, transfer=0.5, activation=6
    )
    assert written_costs("waiting=2").waiting == 2


def test_costs_from_a_file(tmp_path):
    file = tmp_path / "costs.json"
    file.write_text("\ufeff" + json.dumps({"forward": [1, 2], "backward": 3}), encoding="utf-8")
    assert costs(str(file)) == Costs(forward=[1, 2], backward=3)
    file.write_bytes(b'{"forward": "1"}')
    with pytest.raises(argparse.ArgumentTypeError, match="forward is '1': wanted a number"):
        costs(str(file))


@pytest.mark.parametrize(("suffix", "write"), [(".csv", to_csv), (".JSON", to_json)])
def test_schedules_from_files(tmp_path, suffix, write):
    file = tmp_path / f"mine{suffix}"
    file.write_text(write(fill_drain(2, 3)))
    found = read_schedule(file)
    assert found.orders == fill_drain(2, 3).orders
    assert found.name == ("mine" if suffix == ".csv" else "gpipe")
