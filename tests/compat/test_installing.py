"""`install` puts the adapters where old code imports them from; each test in a process of its own."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipework.compat import install
from tests.programs import RunPython

Python = Callable[[str, Path], str]
ROOT = Path(__file__).parents[2]

HIDE = """
import sys
from importlib.machinery import PathFinder

class Others:
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in ("fairscale", "torchgpipe") else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Others() if finder is PathFinder else finder for finder in sys.meta_path]
"""
"""Neither library is there, whatever is installed where the tests run."""

FAIRSCALE = {
    "__init__": "from . import nn",
    "nn/__init__": "from .pipe import Pipe, Wrapper\nfrom .other import Other",
    "nn/other": "class Other: pass",
    "nn/pipe/__init__": "from .pipe import Pipe\nfrom .microbatch import Batch\nclass Wrapper: pass",
    "nn/pipe/pipe": "class Pipe: pass",
    "nn/pipe/microbatch": "class Batch: pass",
}
"""What fairscale is like, in few words."""


@pytest.fixture
def python(run_python: RunPython) -> Python:
    """What some code prints; warnings are errors."""

    def run(code: str, folder: Path) -> str:
        ended = run_python(["-c", code], env=environment(folder))
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join([str(folder), str(ROOT), *filter(None, sys.path)])
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "error"}


@pytest.fixture
def fairscale(tmp_path: Path) -> Path:
    """The folder of a package that is found as fairscale."""
    for name, code in FAIRSCALE.items():
        file = tmp_path / "fairscale" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(code)
    return tmp_path


def test_without_install_nothing_of_others_is_touched(tmp_path: Path) -> None:
    code = """
import sys, torch
before = set(sys.modules), set(dir(torch.distributed)), list(sys.meta_path)
import pipework, pipework.compat, pipework.compat.sync, pipework.compat.torchgpipe, pipework.compat.fairscale
from pipework import Pipe
new = set(sys.modules) - before[0]
print([name for name in new if "pipeline.sync" in name or name.startswith(("fairscale", "torchgpipe"))])
print("pipeline" in set(dir(torch.distributed)) - before[1], list(sys.meta_path) == before[2])
"""
    command = [sys.executable, "-c", HIDE + code]  # imports pipework itself, which others find imported
    ended = subprocess.run(command, env=environment(tmp_path), capture_output=True, text=True, timeout=100, check=True)
    assert ended.stdout == "[]\nFalse True\n"


OLD_IMPORTS = """
from torch.distributed.pipeline.sync import NoChunk, Pipe, WithDevice, is_checkpointing, is_recomputing
from torch.distributed.pipeline.sync.pipe import BalanceError, PipeSequential
from torch.distributed.pipeline.sync.batchnorm import DeferredBatchNorm
from torch.distributed.pipeline.sync.checkpoint import is_checkpointing
from torch.distributed.pipeline.sync.microbatch import NoChunk
from torch.distributed.pipeline.sync.skip import Namespace, pop, skippable, stash, verify_skippables
from torch.distributed.pipeline.sync.skip.namespace import Namespace
from torch.distributed.pipeline.sync.skip.skippable import Skippable, pop, skippable, stash, verify_skippables
from torch.distributed.pipeline.sync.utils import partition_model
from torch.distributed.pipeline.sync._balance import balance_by_size, balance_by_time
import torch.distributed.pipeline.sync as sync
import torch
print(sync.Pipe.__module__, torch.distributed.pipeline.sync.skip.skippable is skippable)

import torchgpipe.balance
from torchgpipe import GPipe, is_checkpointing, is_recomputing
from torchgpipe.balance import balance_by_size, balance_by_time
from torchgpipe.batchnorm import DeferredBatchNorm
from torchgpipe.checkpoint import is_checkpointing
from torchgpipe.gpipe import GPipe
from torchgpipe.skip import Namespace, pop, skippable, stash, verify_skippables
from torchgpipe.skip.skippable import skippable
print(torchgpipe.GPipe.__module__, torchgpipe.balance.balance_by_time is balance_by_time)

import fairscale.nn.pipe
from fairscale.nn import Pipe
from fairscale.nn.pipe import Pipe
from fairscale.nn.pipe.balance import balance_by_size, balance_by_time
from fairscale.nn.pipe.skip import Namespace, pop, skippable, stash, verify_skippables
from fairscale.nn.pipe.skip.skippable import skippable
print(fairscale.nn.Pipe.__module__, fairscale.nn.pipe.Pipe is Pipe)
"""


def test_every_old_import_line_works(python: Python, tmp_path: Path) -> None:
    told = python(f"{HIDE}\nfrom pipework.compat import install\ninstall()\n{OLD_IMPORTS}", tmp_path)
    assert told.splitlines() == [
        "pipework.compat.sync True",
        "pipework.compat.torchgpipe True",
        "pipework.compat.fairscale.nn True",
    ]


def test_installing_twice_changes_nothing(python: Python, tmp_path: Path) -> None:
    code = """
import pickle, sys
from pipework.compat import install, sync
install()
before = dict(sys.modules)
install("fairscale", "sync", "torchgpipe")
import torch.distributed.pipeline.sync as old
print(dict(sys.modules) == before, old is sync, pickle.loads(pickle.dumps(old.Pipe)) is sync.Pipe)
"""
    assert python(HIDE + code, tmp_path) == "True True True\n"


def test_one_library_alone(python: Python, fairscale: Path) -> None:
    code = """
import sys
from pipework.compat import install
install("torchgpipe")
from torchgpipe import GPipe
from fairscale.nn import Pipe
print(GPipe.__module__, Pipe.__module__, "torch.distributed.pipeline" in sys.modules)
"""
    assert python(code, fairscale) == "pipework.compat.torchgpipe fairscale.nn.pipe.pipe False\n"


@pytest.mark.parametrize("libraries", [("pippy",), ("sync", "Sync"), (["sync"],)])
def test_an_unknown_library_is_refused_before_anything_is_done(libraries: tuple[Any, ...]) -> None:
    before = dict(sys.modules)
    told = f"no adapter for {libraries[-1]!r}: there are 'sync', 'torchgpipe', 'fairscale'"
    with pytest.raises(ValueError, match=re.escape(told)):
        install(*libraries)
    assert dict(sys.modules) == before


# fairscale has much more than its Pipe


@pytest.mark.parametrize("earlier", ["", "import fairscale", "import fairscale.nn.pipe.pipe"])
def test_of_a_real_fairscale_only_the_pipe_is_replaced(python: Python, earlier: str, fairscale: Path) -> None:
    code = f"""
{earlier}
from pipework.compat import install
install()
install()
from fairscale.nn import Other, Pipe, Wrapper
import fairscale.nn.pipe
from fairscale.nn.pipe.balance import balance_by_time
from fairscale.nn.pipe.microbatch import Batch
from fairscale.nn.pipe.pipe import Pipe as same
print(Pipe.__module__, fairscale.nn.Pipe is fairscale.nn.pipe.Pipe is same is Pipe)
print(Other.__module__, Wrapper.__module__, Batch.__module__)
"""
    assert python(code, fairscale).splitlines() == [
        "pipework.compat.fairscale.nn True",
        "fairscale.nn.other fairscale.nn.pipe fairscale.nn.pipe.microbatch",
    ]


def test_a_folder_called_fairscale_is_not_fairscale(python: Python, tmp_path: Path) -> None:
    (tmp_path / "fairscale").mkdir()
    code = "import pipework.compat; pipework.compat.install(); from fairscale.nn import Pipe; print(Pipe.__module__)"
    assert python(HIDE + code, tmp_path) == "pipework.compat.fairscale.nn\n"
