"""`python -m pipework.compat script.py` runs a script as `python script.py` would, with the old modules there."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from tests.programs import RunPython

ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """In which this checkout is not on the import path."""
    path = [folder for folder in sys.path if folder and Path(folder).resolve() != ROOT]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONWARNINGS": "error"}


@pytest.fixture
def run(run_python: RunPython) -> RunPython:
    """Runs a script in the folder of this checkout."""

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_python(["-m", "pipework.compat", *arguments], env=environment(), cwd=ROOT)

    return run


def write(path: Path, code: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


def test_a_script_finds_itself_as_usual(run: RunPython, tmp_path: Path) -> None:
    write(tmp_path / "real" / "neighbour.py", "NAME = 'next door'")
    code = '''
        """What it is."""
        import json, sys, typing
        import __main__, neighbour
        from torch.distributed.pipeline.sync import Pipe

        class Annotated:
            number: int

        print(json.dumps({
            "name": __name__,
            "doc": __doc__,
            "file": __file__,
            "arguments": sys.argv,
            "folder": sys.path[0],
            "neighbour": neighbour.NAME,
            "main": __main__.Annotated is Annotated,
            "annotations": Annotated.__annotations__["number"] is int,
            "pipe": Pipe.__module__,
        }))
    '''
    write(tmp_path / "real" / "script.py", code)
    (tmp_path / "link").mkdir()
    link = tmp_path / "link" / "train.py"
    link.symlink_to(tmp_path / "real" / "script.py")
    given = os.path.relpath(link, ROOT)
    arguments = ["--help", "--", "-m", "x y", "--", "--chunks=8"]
    ended = run(Path(given), *arguments)
    assert ended.stderr == ""
    assert json.loads(ended.stdout) == {
        "name": "__main__",
        "doc": "What it is.",
        "file": str(ROOT / given),
        "arguments": [given, *arguments],
        "folder": str(tmp_path / "real"),
        "neighbour": "next door",
        "main": True,
        "annotations": True,
        "pipe": "pipework.compat.sync",
    }
    assert ended.returncode == 0


@pytest.mark.thorough
def test_a_safe_path_stays_safe(tmp_path: Path) -> None:
    script = write(tmp_path / "script.py", "import sys; print(sys.path)")
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    plain, ours = (
        subprocess.check_output([sys.executable, "-P", *module, script], env=path)
        for module in ([], ["-m", "pipework.compat"])
    )
    assert ours == plain


def test_its_end_is_that_of_the_script(run: RunPython, tmp_path: Path) -> None:
    code = """
        import sys

        def train(epochs):
            return 1 / epochs

        if sys.argv[1:]:
            sys.exit("no data")
        train(0)
    """
    script = write(tmp_path / "script.py", code)
    ended = run(script, "stop")
    assert (ended.returncode, ended.stderr, ended.stdout) == (1, "no data\n", "")
    ended = run(script)
    assert ended.returncode == 1
    *_, call, its_code, line, code_of_line, marks, error = ended.stderr.splitlines()
    assert call == f'  File "{script}", line 9, in <module>'
    assert its_code == "    train(0)"
    assert line == f'  File "{script}", line 5, in train'
    assert (code_of_line, marks.strip("~^ ")) == ("    return 1 / epochs", "")
    assert error == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("arguments", [[], ["missing.py"], ["."]])
def test_without_a_script_there_is_a_usage(run: RunPython, arguments: list[str]) -> None:
    ended = run(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("usage: python -m pipework.compat script ...")


SPAWNING = """
    import os, sys
    import torch
    from torch import multiprocessing, nn
    from torch.distributed.pipeline.sync import Pipe
    from torchgpipe import GPipe

    import neighbour

    def replica(rank, folder):
        pipe = GPipe(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), [1, 1], devices=["cpu"] * 2, chunks=2)
        pipe(torch.randn(4, 2)).sum().backward()
        with open(os.path.join(folder, str(rank)), "w") as file:
            print(__name__, __file__, Pipe.__module__, type(pipe).__module__, neighbour.NAME, file=file)

    if __name__ == "__main__":
        folder = os.getcwd()
        os.chdir("/")
        sys.argv = ['something else']
        multiprocessing.spawn(replica, (sys.path[0],), nprocs=2)
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has no distributed")
def test_spawned_processes_find_the_old_modules_too(run: RunPython, tmp_path: Path) -> None:
    write(tmp_path / "neighbour.py", "NAME = 'next door'")
    script = write(tmp_path / "script.py", SPAWNING)
    ended = run(Path(os.path.relpath(script, ROOT)))
    assert (ended.returncode, ended.stderr) == (0, "")
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text().split(" ", 1)[1] == (
            f"{ROOT / os.path.relpath(script, ROOT)} pipework.compat.sync pipework.compat.torchgpipe next door\n"
        )
