import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from pipework.cli import main
from pipework.schedule import Costs, build, fill_drain, simulate, svg, with_recompute


def draw(*words):
    return main(["draw", *words])


def test_text(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert draw("gpipe", "--workers", "2", "--chunks", "2") == 0
    assert capsys.readouterr().out.splitlines() == [
        "gpipe, 2 workers, 2 micro-batches",
        "worker 0  0F0 0F1  .   .   .  0B0---- 0B1----",
        "worker 1   .  1F0 1F1 1B0---- 1B1----  .   .",
        "bubble 33.3 %, makespan 9, peak memory 2 (in micro-batches of activations of a stage)",
    ]


def test_text_keeps_to_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    assert draw("fill-drain", "--workers", "4", "--chunks", "64") == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("worker")]
    assert len(rows) == 4
    assert max(map(len, rows)) <= 60


def test_costs_and_checkpoints_are_heard(capsys):
    words = ("gpipe", "--workers", "3", "--chunks", "4", "--forward", "2", "--backward", "3", "--transfer", "0.5")
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
    assert said.startswith(f"wrote {out}: gpipe, 4 workers, 4 micro-batches, bubble 42.9 %, makespan 21, ")
    assert said.endswith(", peak memory 4 micro-batches\n")
    assert draw("gpipe", "--workers", "4", "--chunks", "4", "--colors", "action", "--out", str(out)) == 0
    assert out.read_text(encoding="utf-8") == svg(line, colors="action")
    ElementTree.fromstring(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("gpip", "--workers", "2", "--chunks", "2"),
            "no schedule is called 'gpip': choose one of 'gpipe', 'fill-drain'",
        ),
        (("gpipe", "--workers", "0", "--chunks", "2"), "argument --workers: '0' is no count"),
        (("gpipe", "--workers", "2", "--chunks", "-1"), "argument --chunks: '-1' is no count"),
        (("gpipe", "--workers", "2", "--chunks", "1.5"), "argument --chunks: '1.5' is no count"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--forward", "-1"), "forward is -1.0: wanted a finite number"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--transfer", "nan"), "transfer is nan"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--backward", "x"), "argument --backward: invalid float value"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--out", "pipe.png"), "the name must end in .svg"),
        (("gpipe", "--workers", "2", "--chunks", "2", "--out", "nowhere/pipe.svg"), "there is no folder 'nowhere'"),
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
