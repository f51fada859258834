import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from pipework.cli import main
from pipework.schedule import (
    Costs,
    build,
    fill_drain,
    from_csv,
    from_json,
    simulate,
    svg,
    validate,
    with_recompute,
)


def draw(*words):
    return main(["draw", *words])


def test_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert draw("gpipe", "--workers", "2", "--chunks", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpipe, 2 workers, 2 micro-batches",
        "worker 0  0F0 0F1  .   .   .  0B0---- 0B1----",
        "worker 1   .  1F0 1F1 1B0---- 1B1----  .   .",
        "bubble 33.3%, makespan 9, peak memory 2 (in micro-batches of activations of a stage)",
    ]


def test_text_keeps_to_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert draw("fill-drain", "--workers", "4", "--chunks", "64") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 60


def test_costs_and_checkpoints_are_heard(capsys):
    words = ("gpipe", "--workers", "3", "--chunks", "4", "--costs", "F=2,backward=3,c=.5")
    for mode, count in [("never", 0), ("except_last", 3), ("always", 4)]:
        assert draw(*words, "--checkpoint", mode) == 0
        wanted = simulate(with_recompute(fill_drain(3, 4), count), Costs(forward=2, backward=3, transfer=0.5))
        assert f"makespan {wanted.makespan:.4g}, peak memory {max(wanted.peak_memory):g} " in capsys.readouterr().out


def test_costs_are_of_a_workers_whole_share(capsys):
    assert draw("interleaved-1f1b", "--workers", "4", "--chunks", "8") == 0
    said = capsys.readouterr().out
    assert "makespan 28.5, peak memory 5.5 (in micro-batches of activations of a worker)" in said
    assert draw("looped-bfs", "--workers", "2", "--chunks", "4", "--stages-per-worker", "3") == 0
    assert "makespan 13, peak memory 4 (" in capsys.readouterr().out


def test_svg_of_several_stages_per_worker_is_by_action(tmp_path):
    out = tmp_path / "pipe.svg"
    words = ("interleaved-1f1b", "--workers", "2", "--chunks", "4", "--out", str(out))
    half = simulate(build("interleaved-1f1b", workers=2, chunks=4), Costs(0.5, 1.0, activation=0.5)).timeline
    half = replace(half, memory_unit="micro-batches")
    assert draw(*words) == 0
    assert out.read_text(encoding="utf-8") == svg(half, colors="action")
    assert draw(*words, "--colors", "worker") == 0
    assert out.read_text(encoding="utf-8") == svg(half, colors="worker", update=True)


def test_svg_by_worker_unless_told_otherwise(tmp_path, capsys):
    line = replace(simulate(fill_drain(4, 4)).timeline, memory_unit="micro-batches")
    out = tmp_path / "pipe.svg"
    assert draw("gpipe", "--workers", "4", "--chunks", "4", "--out", str(out)) == 0
    assert out.read_text(encoding="utf-8") == svg(line, colors="worker", update=True)
    said = capsys.readouterr().out
    assert said.startswith(f"wrote {out}: gpipe, 4 workers, 4 micro-batches, bubble 42.9%, makespan 21, ")
    assert said.endswith(", peak memory 4 micro-batches\n")
    assert draw("gpipe", "--workers", "4", "--chunks", "4", "--colors", "action", "--out", str(out)) == 0
    assert out.read_text(encoding="utf-8") == svg(line, colors="action")
    ElementTree.fromstring(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("gpip", "--workers", "2", "--chunks", "2"),
            "no schedule is called 'gpip': did you mean 'gpipe'? Choose one of 'gpipe', 'fill-drain'",
        ),
        (("gpipe", "--workers", "0", "--chunks", "2"), "argument --workers: '0' is not a count"),
        (("gpipe", "--workers", "2", "--chunks", "-1"), "argument --chunks: '-1' is not a count"),
        (("gpipe", "--workers", "2", "--chunks", "1.5"), "argument --chunks: '1.5' is not a count"),
        (("gpipe", "--chunks", "2"), "--workers missing: give a number, such as --workers 4"),
        (("gpip",), "no schedule is called 'gpip'"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--costs", "F=-1"), "forward is -1.0: wanted a finite number"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--costs", "F=1,c=nan"), "transfer is nan"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--costs", "B=x"), "'B=x' is not a cost: wanted name=number"),
        (
            ("gpipe", "--workers", "2", "--chunks", "2", "--costs", "G=1"),
            "no cost is called 'G': choose one of 'F', 'B', 'I'",
        ),
        (("gpipe", "--workers", "2", "--chunks", "2", "--costs", "no.json"), "cannot read no.json: No such file"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--out", "pipe.gif"), "the name must end in one of .trace.json"),
        (("pipe.csv", "--workers", "2"), "the file pipe.csv sets the numbers of workers"),
        (("pipe.csv",), "cannot read pipe.csv: No such file"),
        (
            ("forward-only", "--workers", "2", "--chunks", "2", "--checkpoint", "always"),
            "--checkpoint is 'always', but forward-only has no backwards to recompute: leave it out",
        ),
        (
            ("gpipe", "--workers", "2", "--chunks", "2", "--out", "nowhere/pipe.svg"),
            "the folder 'nowhere' does not exist",
        ),
    ],
)
def test_refuses_with_one_line(words, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert draw(*words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.startswith("python -m pipework draw: error: ")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_folder_in_the_way(tmp_path, capsys):
    (tmp_path / "pipe.svg").mkdir()
    assert draw("gpipe", "--workers", "2", "--chunks", "2", "--out", str(tmp_path / "pipe.svg")) == 2
    assert "pipe.svg" in capsys.readouterr().err


def test_the_schedule_for_other_programs(tmp_path, capsys):
    words = ("zb-v", "--workers", "2", "--chunks", "4")
    schedule = build("zb-v", workers=2, chunks=4)
    for name, read in (
        ("a.csv", from_csv),
        ("a.json", from_json),
    ):
        assert draw(*words, "--out", str(tmp_path / name)) == 0
        assert read((tmp_path / name).read_text()).orders == schedule.orders
        capsys.readouterr()
        assert draw(str(tmp_path / name)) == 0  # and back again
        assert "makespan 12.5, peak memory 2 (" in capsys.readouterr().out
    assert draw(*words, "--channel", "pair", "--out", str(tmp_path / "b.csv")) == 0
    lowered = from_csv((tmp_path / "b.csv").read_text())
    assert lowered.communicates
    assert validate(lowered, channel="pair").ok


def test_a_trace_has_the_transfers_that_are_asked_for(tmp_path):
    out = tmp_path / "a.trace.json"
    for words, tracks in (((), {"compute"}), (("--channel", "worker"), {"compute", "send", "receive"})):
        assert draw("1f1b", "--workers", "2", "--chunks", "3", *words, "--out", str(out)) == 0
        events = json.loads(out.read_text())["traceEvents"]
        assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == tracks


def test_the_size_of_a_huge_file_is_told(tmp_path, capsys, monkeypatch):
    words = ("1f1b", "--workers", "2", "--chunks", "3", "--out", str(tmp_path / "a.svg"))
    assert draw(*words) == 0
    assert f"wrote {tmp_path / 'a.svg'}: 1f1b" in capsys.readouterr().out
    monkeypatch.setattr("pipework.cli.draw.svg", lambda *_, **__: "x" * 11 * 2**20)
    assert draw(*words) == 0
    assert f"wrote {tmp_path / 'a.svg'} (11 MiB): 1f1b" in capsys.readouterr().out


def test_shares_of_uneven_stages(tmp_path, capsys):
    (tmp_path / "uneven.csv").write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    assert draw(str(tmp_path / "uneven.csv")) == 0
    assert "makespan 6, peak memory 1 (in micro-batches of activations of a worker)" in capsys.readouterr().out


def test_costs_from_a_file_have_numbers_for_stages(tmp_path, capsys):
    (tmp_path / "costs.json").write_text('{"forward": [1, 2], "backward": [2, 4], "transfer": 0.5}')
    assert draw("gpipe", "--workers", "2", "--chunks", "2", "--costs", str(tmp_path / "costs.json")) == 0
    wanted = simulate(fill_drain(2, 2), Costs([1, 2], [2, 4], transfer=0.5)).makespan
    assert f"makespan {wanted:g}," in capsys.readouterr().out
    (tmp_path / "costs.json").write_text("[1, 2]")
    assert draw("gpipe", "--workers", "2", "--chunks", "2", "--costs", str(tmp_path / "costs.json")) == 2
    assert "holds a list: wanted an object" in capsys.readouterr().err
    (tmp_path / "costs.json").write_bytes(b"\xff\xfe")
    assert draw("gpipe", "--workers", "2", "--chunks", "2", "--costs", str(tmp_path / "costs.json")) == 2
    assert "costs.json is not text: wanted JSON in UTF-8" in capsys.readouterr().err
    (tmp_path / "costs.json").write_text('{"forward": "1"}')
    assert draw("gpipe", "--workers", "2", "--chunks", "2", "--costs", str(tmp_path / "costs.json")) == 2
    assert "forward is '1': wanted a number" in capsys.readouterr().err
