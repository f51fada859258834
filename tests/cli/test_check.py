import pytest

from pipework.cli import main
from pipework.schedule import build, fill_drain, to_csv, to_json, with_communication, zb_v

DEFAULT_COSTS = "  for the default costs, forward=1,backward=2,activation=1; give those of your model with --costs"


def check(*words):
    return main(["check", *map(str, words)])


def test_a_schedule_that_can_be_executed(tmp_path, capsys):
    file = tmp_path / "zb.csv"
    file.write_text(to_csv(zb_v(4, 8)))
    assert check(file) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: can be executed (4 workers, 8 stages, 8 micro-batches, 192 actions)",
        "  bubble 5.9%, makespan 25.5, peak memory 4",
        DEFAULT_COSTS,
    ]


def test_one_of_each(tmp_path, capsys):
    file = tmp_path / "one.csv"
    file.write_text("0F0,0B0")
    assert check(file) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: can be executed (1 worker, 1 stage, 1 micro-batch, 2 actions)",
        "  bubble 0.0%, makespan 3, peak memory 1",
        DEFAULT_COSTS,
    ]


def test_costs_are_of_shares_however_many_stages_a_worker_has(tmp_path, capsys):
    """Worker 0 has two of the three stages; each worker's forward takes 1, its backward 2."""
    file = tmp_path / "uneven.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    assert check(file) == 0
    assert "makespan 6, peak memory 1" in capsys.readouterr().out
    assert check(file, "--costs", "F=2,B=2") == 0
    out = capsys.readouterr().out
    assert "makespan 8, peak memory 1" in out
    assert "default costs" not in out


def test_costs_of_each_worker(tmp_path, capsys):
    (tmp_path / "costs.json").write_text('{"forward": [2, 1], "backward": [2, 3], "transfer": [0.5]}')
    file = tmp_path / "uneven.csv"
    file.write_text("0F0,2F0,2B0,0B0\n1F0,1B0")
    assert check(file, "--costs", tmp_path / "costs.json") == 0
    assert "makespan 10, " in capsys.readouterr().out


def test_a_byte_order_mark_is_no_action(tmp_path):
    file = tmp_path / "excel.csv"
    file.write_bytes(b"\xef\xbb\xbf0F0,0B0")
    assert check(file) == 0


def test_one_that_cannot(tmp_path, capsys):
    file = tmp_path / "wrong.csv"
    file.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    assert check(file) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        f"{file}: cannot be executed (2 workers, 2 stages, 2 micro-batches, 8 actions)",
        "  worker 0 waits forever at 0B0: it needs 1B0, which worker 1 never reaches",
        "  and 1 more: --all lists them",
    ]
    assert check(file, "--all") == 1
    assert "worker 1 waits forever at 1F1" in capsys.readouterr().out


def test_memory_and_channels(tmp_path, capsys):
    file = tmp_path / "gpipe.json"
    file.write_text(to_json(fill_drain(2, 8)))
    assert check(file, "--memory", "8") == 0
    assert check(file, "--memory", "7.5") == 1
    assert "worker 0 holds 8 at 0F7, more than its limit of 7.5" in capsys.readouterr().out
    file = tmp_path / "1f1b.csv"
    text = to_csv(with_communication(build("1f1b", workers=2, chunks=4)), form="compute_comms")
    file.write_text(text)
    assert check(file, "--channel", "pair") == 0
    capsys.readouterr()
    assert check(file, "--channel", "worker") == 1
    assert capsys.readouterr().out.splitlines()[1].startswith("  worker 0 waits forever at 0B0: it needs 0RECV_B0, ")
    file.write_text(
        "0F0,0F1,0SEND_F1,0SEND_F0,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    )
    assert check(file) == 0
    capsys.readouterr()
    assert check(file, "--channel", "pair") == 1
    said = capsys.readouterr().out
    assert "it needs 1RECV_F0, which waits in a queue behind transfers that the other side posts later" in said


def test_gradients_out_of_order_are_told(tmp_path, capsys):
    file = tmp_path / "descending.csv"
    file.write_text("0F0,0F1,0B1,0B0")
    assert check(file) == 0
    assert "gradients are not formed in the order of micro-batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "0F0,0Q0", "row 1, column 2 of the CSV: '0Q0' is not an action"),
        ("a.csv", "0F0\n2F0", "stage 1 has no action, though"),
        ("a.json", "{}", "not a schedule of pipework"),
        ("a.xml", "", "not a file of a schedule: the name must end in one of .csv, .json"),
        ("b.csv", None, "b.csv: No such file or directory; give the path of a file that holds a schedule"),
        ("c.csv", b"\xff\xfe0\x00", "c.csv is not text: wanted a schedule in UTF-8"),
        ("a.csv", "0F0,0SEND_F0,0B0", "a.csv: the CSV makes no schedule: "),
        ("a.json", to_json(fill_drain(1, 1)).replace("[0]", '["0"]'), "a.json: the JSON makes no schedule: placement"),
    ],
)
def test_what_holds_no_schedule(tmp_path, capsys, name, text, message):
    if text is not None:
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    assert check(tmp_path / name) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1
