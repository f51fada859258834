import os
import subprocess
import sys

import pytest

import pipework
from pipework.cli import main


def python(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "pipework", *words], capture_output=True, text=True, check=False, **options
    )


def test_without_words_prints_help(capsys):
    assert main([]) == 0
    said = capsys.readouterr().out
    assert "draw" in said
    assert "env" in said


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pipework {pipework.__version__}\n"


@pytest.mark.parametrize("words", [["paint"], ["--draw"], ["draw"], ["draw", "gpipe", "--workers", "2"]])
def test_a_mistake_is_one_line_and_status_two(capsys, words):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert "error:" in err


@pytest.mark.parametrize("words", [["draw", "gpipe", "--workers", "2", "--chunks", "2"], ["--help"], []])
def test_a_reader_that_has_ended_is_no_error(monkeypatch, capsys, words):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(words) == 141
        out.write("what is left")  # goes nowhere, also when the file is closed
    assert capsys.readouterr().err == ""


def test_as_a_module():
    done = python("draw", "gpipe", "--workers", "2", "--chunks", "2", "--costs", "backward=1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "worker 1   .  1F0 1F1 1B0 1B1  .\n" in done.stdout
    failed = python("draw", "gpipe", "--workers", "0", "--chunks", "2")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1
