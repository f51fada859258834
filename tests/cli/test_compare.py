import json

from pipework.cli import main
from pipework.schedule import SCHEDULES, Costs, compare, fill_drain, simulate
from pipework.timeline import Recording


def run(*words):
    return main(["compare", *words])


def test_a_table_sorted_by_time(capsys):
    assert run("--workers", "8", "--chunks", "32", "--memory", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == [
        "schedule",
        "stages",
        "makespan",
        "bubble",
        "span",
        "span",
        "bubble",
        "memory",
        "transfers",
        "to",
        "bound",
    ]
    assert [line.split()[:7] for line in lines[1:3]] == [
        ["v-half", "2", "104.5", "8.1%", "104.5", "8.1%", "5"],
        ["v-min", "2", "109.5", "12.3%", "109.5", "12.3%", "4"],
    ]
    others = lines[lines.index("do not fit:") + 1 :]
    assert {line.split()[0] for line in others} == set(SCHEDULES) - {"v-half", "v-min", "fill-drain", "forward-only"}
    assert "gpipe             a worker holds 32, more than the limit of 5" in others[0]


def test_json(capsys):
    words = ("--workers", "4", "--chunks", "8", "--costs", "F=1,I=1.1,W=.7,c=.05", "--channel", "pair")
    assert run(*words, "--json") == 0
    said = json.loads(capsys.readouterr().out)
    found = compare(workers=4, chunks=8, costs=Costs(1, None, None, 1.1, 0.7, transfer=0.05), channel="pair")
    assert said["schedules"] == found.rows()
    assert (said["workers"], said["chunks"], said["memory_limit"], said["channel"]) == (4, 8, None, "pair")
    assert said["costs"]["transfer"] == 0.05
    assert said["others"] == {}


def test_nothing_fits(capsys):
    assert run("--workers", "2", "--chunks", "4", "--memory", "0.25") == 0
    assert capsys.readouterr().out.startswith("no schedule fits\n\ndo not fit:\n")


def test_numbers_for_stages(tmp_path, capsys):
    words = ("--workers", "4", "--chunks", "8", "--costs", str(tmp_path / "costs.json"))
    (tmp_path / "costs.json").write_text('{"forward": [1, 1, 1, 1, 1, 1, 1, 1]}')
    assert run(*words) == 0
    said = capsys.readouterr().out
    assert "do not fit:" not in said
    assert "for other numbers of stages:\n  gpipe " in said
    (tmp_path / "costs.json").write_text('{"forward": [1, 1, 1, 1, 1]}')
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no schedule has as many stages: Costs: forward has 5 numbers" in err


def test_mistakes(capsys):
    for pairs in ("F=1,F=2", "forward=1,F=2"):
        assert run("--workers", "2", "--chunks", "2", "--costs", pairs) == 2
        assert "forward is given twice: give it once" in capsys.readouterr().err
    assert run("--workers", "8") == 2
    assert run("--workers", "8", "--chunks", "2", "--memory", "-1") == 2
    assert "'-1' is not an amount of memory" in capsys.readouterr().err


def test_costs_that_were_measured_and_saved(tmp_path, capsys):
    recording = Recording()
    found = simulate(fill_drain(2, 4), Costs(forward=[1, 2], backward=[3, 4]))
    recording.begin(0, found.schedule)
    recording.add(0, found.timeline.intervals)
    file = tmp_path / "costs.json"
    recording.costs().save(file)
    assert run("--workers", "2", "--chunks", "4", "--costs", str(file)) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1:] == str(compare(workers=2, chunks=4, costs=recording.costs())).splitlines()[1:]
