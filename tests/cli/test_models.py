import subprocess
import sys

import pytest

from pipework.cli import main
from pipework.planning.plan import Plan
from tests.planning.made_profiles import made


def run(*words):
    return main(["plan", *words])


@pytest.fixture
def profile(tmp_path):
    """The file of a profile of six layers for one kind of device."""
    path = tmp_path / "profile.json"
    made([1, 2, 1, 1, 2, 1]).save(path)
    return str(path)


def test_a_plan_is_printed_and_written(tmp_path, capsys, profile):
    files = [tmp_path / f"plan.{ending}" for ending in ("json", "svg", "csv")]
    words = [word for file in files for word in ("-o", str(file))]
    assert run(profile, "--workers", "2", "--chunks", "4,8", "--iterations", "20", "--quiet", *words) == 0
    out, err = capsys.readouterr()
    assert err == ""
    plan = Plan.load(files[0])
    assert out == f"{plan}\n"
    assert plan.devices == ("device", "device")
    assert plan.chunks in (4, 8)
    assert files[1].read_text().startswith("<svg")
    assert files[2].read_text().count("\n") == 2


def test_progress_goes_to_the_other_stream(capsys, profile):
    assert run(profile, "--workers", "2", "--iterations", "5") == 0
    out, err = capsys.readouterr()
    assert out.startswith("plan: 6 layers on 2 workers, ")
    assert ", layers [" in err


def test_what_may_be_chosen_is_what_is_said(capsys, profile):
    words = (
        "--schedules",
        "1f1b,gpipe",
        "--batch",
        "16",
        "--optimizer",
        "0",
        "--chunks",
        "8",
        "--memory",
        "4KiB",
        "--no-offload",
    )
    assert run(profile, "--workers", "3", "--iterations", "20", "--quiet", *words) == 0
    out = capsys.readouterr().out
    assert "8 micro-batches of 2 rows" in out
    assert "4 KiB" in out
    assert "schedules with a name, by the profile: 1f1b " in out
    assert "zb-h1" not in out


def test_several_kinds_of_device(tmp_path, capsys):
    path = tmp_path / "two.json"
    made([1] * 6, speeds={"fast": 2.0, "slow": 1.0}).save(path)
    words = (str(path), "--iterations", "10", "--quiet", "--chunks", "4")
    assert run(*words, "--workers", "2") == 2
    assert (
        "give --workers if the profile has one kind of device, or else --devices; it has 'fast', 'slow'"
        in capsys.readouterr().err
    )
    assert (
        run(*words, "--devices", "fast,fast,slow", "--memory", "fast=1MiB,slow=2MiB", "-o", str(tmp_path / "p.json"))
        == 0
    )
    plan = Plan.load(tmp_path / "p.json")
    assert plan.devices.count("fast") == 2
    limits = {device: held.limit for device, held in zip(plan.devices, plan.workers, strict=True)}
    assert limits["fast"] == 2**20
    assert limits.get("slow", 2**21) == 2**21


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", "2", "--memory", "500B"), "; it fits with memory='1.2"),
        (("--workers", "2", "--memory", "much"), "memory is 'much': wanted a number and a unit"),
        (
            ("--workers", "2", "--memory", "device=1GiB,2GiB"),
            "'device=1GiB,2GiB': wanted NAME=SIZE,NAME=SIZE, or one SIZE",
        ),
        (("--workers", "2", "--optimizer", "adam"), "argument --optimizer: invalid float value: 'adam'"),
        (("--workers", "2", "--schedules", ","), "schedules is empty"),
        (("--devices", ","), "devices is empty"),
        (("--workers", "2", "--bogus"), "unrecognized arguments: --bogus"),
        (("--workers", "2", "--chunks", "4,x"), "argument --chunks: invalid counts value: '4,x'"),
        (("--workers", "2", "-o", "plan.txt"), "-o plan.txt: wanted a name in a folder that exists, which ends in"),
        (("--workers", "2", "-o", "no/such/plan.json"), "-o no/such/plan.json: wanted a name in a folder that exists"),
        (("--workers", "2", "--devices", "device"), "give --workers if the profile has one kind of device, or"),
        ((), "give --workers if the profile has one kind of device, or"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_written(tmp_path, monkeypatch, capsys, profile, words, said):
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.iterdir())
    assert run(profile, "--iterations", "5", "--quiet", *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1
    assert set(tmp_path.iterdir()) == before


def test_these_commands_need_no_torch(tmp_path, profile):
    svg, suffix = tmp_path / "x.svg", ["convert", str(tmp_path), str(tmp_path / "model.pt")]
    code = (
        "import sys; sys.modules['torch'] = None\n"  # any import of torch raises
        "from pipework.cli import main\n"
        f"assert main(['plan', {profile!r}, '--workers', '2', '--iterations', '5', '--quiet']) == 0\n"
        f"assert main(['draw', 'gpipe', '--workers', '2', '--chunks', '2', '--out', {str(svg)!r}]) == 0\n"
        f"sys.exit(main({suffix!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.startswith("plan: 6 layers on 2 workers, ")
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1
    assert "model.pt: wanted a name that ends in .safetensors" in done.stderr
