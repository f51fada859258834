import json
from dataclasses import replace

import pytest

from pipework.cli import main
from pipework.schedule import (
    SCHEDULES,
    Costs,
    build,
    fill_drain,
    from_csv,
    from_json,
    simulate,
    svg,
    to_csv,
    to_json,
    validate,
    with_communication,
    zb_v,
)


def run(*words):
    return main([*map(str, words)])


def draw(*words):
    return run("draw", *words)


def test_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert draw("gpipe", "--workers", "2", "--chunks", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpipe, 2 workers, 2 micro-batches",
        "worker 0  0F0 0F1  .   .   .  0B0---- 0B1----",
        "worker 1   .  1F0 1F1 1B0---- 1B1----  .   .",
        "bubble 33.3%, makespan 9, peak memory 2 (in micro-batches of activations of a stage)",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    assert draw("fill-drain", "--workers", "4", "--chunks", "64") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 60


def test_costs_are_of_a_workers_whole_share(capsys, tmp_path):
    (tmp_path / "uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    for words, said in [
        (("interleaved-1f1b", "--workers", "4", "--chunks", "8"), "makespan 28.5, peak memory 5.5 ("),
        (("looped-bfs", "--workers", "2", "--chunks", "4", "--stages-per-worker", "3"), "makespan 13, peak memory 4 ("),
        ((tmp_path / "uneven.csv",), "makespan 6, peak memory 1 (in micro-batches of activations of a worker)"),
    ]:
        assert draw(*words) == 0
        assert said in capsys.readouterr().out
    assert draw("gpipe", "--workers", "3", "--chunks", "4", "--costs", "F=2,backward=3,c=.5") == 0
    wanted = simulate(fill_drain(3, 4), Costs(forward=2, backward=3, transfer=0.5))
    assert f"makespan {wanted.makespan:.4g}, peak memory 4 " in capsys.readouterr().out


@pytest.mark.parametrize(("name", "colors"), [("gpipe", "worker"), ("interleaved-1f1b", "action"), ("zb-h1", "action")])
def test_a_picture(tmp_path, capsys, name, colors):
    out = tmp_path / "pipe.svg"
    schedule = build(name, workers=2, chunks=4)
    line = simulate(schedule, Costs(1, 2).placed(schedule.placement)).timeline
    assert draw(name, "--workers", "2", "--chunks", "4", "--costs", "F=1,B=2", "--out", out) == 0
    wanted = svg(replace(line, memory_unit="micro-batches"), colors=colors, update=colors == "worker")
    assert out.read_text(encoding="utf-8") == wanted
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {out}: {schedule.title}, bubble {line.bubble:.1%}, makespan {line.makespan:g}, ")
    assert said.endswith(" micro-batches\n")


def test_the_schedule_for_other_programs(tmp_path, capsys):
    words = ("zb-v", "--workers", "2", "--chunks", "4")
    schedule = build("zb-v", workers=2, chunks=4)
    for name, read in (("a.csv", from_csv), ("a.json", from_json)):
        assert draw(*words, "--out", tmp_path / name) == 0
        assert read((tmp_path / name).read_text()).orders == schedule.orders
        capsys.readouterr()
        assert draw(tmp_path / name) == 0  # and back again
        assert "makespan 12.5, peak memory 2 (" in capsys.readouterr().out
    assert draw(*words, "--channel", "pair", "--out", tmp_path / "b.csv") == 0
    lowered = from_csv((tmp_path / "b.csv").read_text())
    assert lowered.communicates
    assert validate(lowered, channel="pair").ok


def test_a_trace_has_the_transfers_that_are_asked_for(tmp_path):
    out = tmp_path / "a.trace.json"
    for words, tracks in (((), {"compute"}), (("--channel", "worker"), {"compute", "send", "receive"})):
        assert draw("1f1b", "--workers", "2", "--chunks", "3", *words, "--out", out) == 0
        events = json.loads(out.read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == tracks


SIZE = ("--workers", "2", "--chunks", "2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("draw", "gpip", *SIZE), "no schedule is called 'gpip': did you mean 'gpipe'? Choose one of 'gpipe', 'fill-"),
        (("draw", "gpip"), "no schedule is called 'gpip'"),
        (("draw", "gpipe", "--workers", "0", "--chunks", "2"), "workers is 0: wanted an integer of at least 1"),
        (("draw", "gpipe", "--workers", "2", "--chunks", "1.5"), "argument --chunks: invalid int value: '1.5'"),
        (("draw", "gpipe", "--chunks", "2"), "--workers or --chunks is missing: give numbers, such as --workers 4"),
        (("draw", "gpipe", *SIZE, "--costs", "F=-1"), "forward is -1.0: wanted a finite number"),
        (("draw", "gpipe", *SIZE, "--costs", "B=x"), "'B=x' is not a cost: wanted name=number"),
        (("draw", "gpipe", *SIZE, "--costs", "G=1"), "no cost is called 'G': choose one of 'F', 'B', 'I'"),
        (("draw", "gpipe", *SIZE, "--costs", "no.json"), "No such file or directory: 'no.json'"),
        (("draw", "gpipe", *SIZE, "--out", "pipe.gif"), "the name must end in one of .trace.json"),
        (("draw", "gpipe", *SIZE, "--out", "nowhere/pipe.svg"), "No such file or directory: 'nowhere/pipe.svg'"),
        (("draw", "gpipe", *SIZE, "--out", "in_the_way.svg"), "in_the_way.svg"),
        (("draw", "pipe.csv", "--workers", "2"), "the file pipe.csv sets the numbers of workers"),
        (("draw", "pipe.csv"), "No such file or directory: 'pipe.csv'"),
        (("compare", "--workers", "8"), "the following arguments are required: --chunks"),
        (("compare", *SIZE, "--costs", "forward=1,F=2"), "forward is given twice: give it once"),
        (("compare", *SIZE, "--memory", "-1"), "memory_limit of worker 0 is -1.0: wanted a number of at least 0"),
        (("check", "mine.xml"), "not a file of a schedule: the name must end in one of .csv, .json"),
        (("check", "mine.csv"), "No such file or directory: 'mine.csv'"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in_the_way.svg").mkdir()
    assert run(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith(f"python -m pipework {words[0]}: error: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in_the_way.svg"]


def test_a_table_of_all_schedules_sorted_by_time(capsys):
    assert run("compare", "--workers", "8", "--chunks", "32", "--memory", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert " ".join(lines[0].split()) == "schedule stages makespan bubble span span bubble memory transfers to bound"
    assert [line.split()[:7] for line in lines[1:3]] == [
        ["v-half", "2", "104.5", "8.1%", "104.5", "8.1%", "5"],
        ["v-min", "2", "109.5", "12.3%", "109.5", "12.3%", "4"],
    ]
    others = lines[lines.index("do not fit:") + 1 :]
    assert {line.split()[0] for line in others} == set(SCHEDULES) - {"v-half", "v-min", "fill-drain", "forward-only"}
    assert "gpipe             worker 0 holds 32, more than its limit of 5" in others[0]
    assert run("compare", "--workers", "2", "--chunks", "4", "--memory", "0.25") == 0
    assert capsys.readouterr().out.startswith("no schedule fits\n\ndo not fit:\n")


DEFAULT_COSTS = "  for the default costs; give those of your model with --costs"


def test_a_schedule_that_can_be_executed(tmp_path, capsys):
    file = tmp_path / "zb.csv"
    file.write_text(to_csv(zb_v(4, 8)))
    assert run("check", file) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: can be executed (zb, 4 workers, 8 micro-batches)",
        "  bubble 5.9%, makespan 25.5, peak memory 4",
        DEFAULT_COSTS,
    ]
    file.write_text("\ufeff0F0,0F1,0B1,0B0", encoding="utf-8")  # as spreadsheets write it
    assert run("check", file, "--costs", "F=2,B=2") == 0
    said = capsys.readouterr().out
    assert "gradients are not formed in the order of micro-batches" in said
    assert DEFAULT_COSTS not in said


def test_one_that_cannot_be_executed(tmp_path, capsys):
    file = tmp_path / "wrong.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert run("check", file) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        f"{file}: cannot be executed (wrong, 2 workers, 2 micro-batches)",
        "  worker 0 waits forever at 0B0: it needs 1B0, which worker 1 never reaches",
        "  worker 1 waits forever at 1F1: it needs 0F1, which worker 0 never reaches",
    ]


def test_memory_and_channels(tmp_path, capsys):
    file = tmp_path / "gpipe.json"
    file.write_text(to_json(fill_drain(2, 8)))
    assert run("check", file, "--memory", "8") == 0
    assert run("check", file, "--memory", "7.5") == 1
    assert "worker 0 holds 8 at 0F7, more than its limit of 7.5" in capsys.readouterr().out
    file = tmp_path / "1f1b.csv"
    file.write_text(to_csv(with_communication(build("1f1b", workers=2, chunks=4))))
    assert run("check", file, "--channel", "pair") == 0
    capsys.readouterr()
    assert run("check", file, "--channel", "worker") == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("  worker 0 waits forever at 0B0: it needs 0RECV_B0, ")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"0F0,0Q0", "a.csv: row 1, column 2 of the CSV: '0Q0' is not an action"),
        ("a.json", b"{}", "a.json: the JSON is not a schedule of pipework"),
        ("a.csv", b"\xff\xfe0\x00", "a.csv: 'utf-8' codec can't decode byte 0xff"),
        ("a.csv", b"0F0,0SEND_F0,0B0", "a.csv: the CSV makes no schedule: "),
    ],
)
def test_a_file_that_holds_no_schedule(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    assert run("check", tmp_path / name) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
