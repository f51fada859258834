"""How a process ends that failed."""

import subprocess
import time
from collections.abc import Callable

import pytest

from tests.distributed.conftest import HARD
from tests.programs import RunPython

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture
def run(run_python: RunPython) -> Run:
    return lambda code: run_python(["-c", code], timeout=HARD)


INSTALL = "from pipework.distributed.health.process_exit import install; install(); install()\n"


@pytest.mark.parametrize(
    ("statement", "code"),
    [
        ("raise ValueError('bad row')", 70),
        ("from pipework import PipelineError; raise PipelineError('bad row', rank=1)", 71),
        ("from pipework import PipelineError; raise PipelineError('bad row', rank=1, kind='lost')", 72),
        ("raise SystemExit(5)", 5),
        ("raise KeyboardInterrupt", -2),
        ("import atexit, time; atexit.register(time.sleep, 6)", 0),  # who has not failed may take long
    ],
)
def test_exit_codes(run: Run, statement: str, code: int) -> None:
    done = run(INSTALL + statement)
    assert done.returncode in (code, 130 if code == -2 else code)
    assert ("bad row" in done.stderr) == ("bad row" in statement)
    assert "Exception ignored" not in done.stderr


def test_an_earlier_hook_still_prints(run: Run) -> None:
    done = run("import sys\nsys.excepthook = lambda *_: print('mine')\n" + INSTALL + "raise ValueError('bad row')")
    assert (done.returncode, done.stdout, done.stderr) == (70, "mine\n", "")


def test_who_hears_of_an_exception_ends_after_who_raised_it(run: Run) -> None:
    late = "import atexit, time\nbegin = time.monotonic()\natexit.register(lambda: print(time.monotonic() - begin))\n"
    seconds = [
        float(run(late + INSTALL + f"from pipework import PipelineError; raise {error}").stdout)
        for error in ("PipelineError('bad row', rank=1)", "PipelineError('gone', rank=1, kind='lost')", "ValueError()")
    ]
    assert seconds[0] >= 1.0
    assert max(seconds[1:]) < seconds[0]


def test_what_hangs_at_the_end_does_not_hang_for_ever(run: Run) -> None:
    earlier = "import atexit, time\natexit.register(time.sleep, 3600)\n"
    begin = time.monotonic()
    done = run(earlier + INSTALL + "raise ValueError('bad row')")
    assert done.returncode in (70, 1)  # 1 if faulthandler was first
    assert "bad row" in done.stderr
    assert time.monotonic() - begin > 4  # what ends in time is not disturbed


def test_a_thread_that_does_not_end_is_shown(run: Run) -> None:
    code = "from pipework.distributed.health.process_exit import end_now\n"
    code += "def stuck():\n    end_now('no end in sight', 71)\nstuck()"
    done = run(code)
    assert done.returncode == 71
    assert "no end in sight" in done.stderr
    assert "in stuck" in done.stderr
