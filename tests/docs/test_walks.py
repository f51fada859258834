"""The walks of docs/walks.md: every file and name on the page exists, and the way to a layer stays short."""

import re
import sys
import threading
import traceback
from collections.abc import Callable
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pipework
from pipework import Mesh, Pipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "walks.md").read_text()
MOST = 8  # files between `pipe(x)` and a layer
NAMED = re.compile(r"`(pipework/[\w/]+)\.py`\s+·\s+`([\w.]+)`")


def test_every_name_is_where_the_page_says() -> None:
    for file, name in NAMED.findall(PAGE):
        attrgetter(name)(import_module(file.replace("/", ".")))


def test_every_file_has_a_name_to_begin_with() -> None:
    files = set(re.findall(r"`(pipework/[\w/]+)\.py`", PAGE))
    assert files == {file for file, _ in NAMED.findall(PAGE)}


class Where(nn.Module):
    """Notes which files of pipework are on the stacks of its caller and of its worker."""

    def __init__(self) -> None:
        super().__init__()
        self.files: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        package = str(Path(pipework.__file__).parent)
        frames = [*traceback.extract_stack(), *traceback.extract_stack(sys._current_frames()[main_thread()])]
        self.files |= {frame.filename for frame in frames if frame.filename.startswith(package)}
        return x


def main_thread() -> int:
    ident = threading.main_thread().ident
    assert ident is not None
    return ident


def test_few_files_are_between_the_call_and_a_layer() -> None:
    where = Where()
    Pipe(nn.Sequential(where, nn.Linear(2, 2)), 2, balance=[1, 1], devices=["cpu", "cpu"])(torch.ones(4, 2))
    assert 0 < len(where.files) <= MOST
    walk = PAGE.partition("## A value")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\d\. `(pipework/[\w/]+\.py)`", walk, re.MULTILINE))
    assert {str(Path(file).relative_to(ROOT)) for file in where.files} == listed - {"pipework/backend.py"}


def files_on_a_rank(mesh: Mesh) -> int:
    where = Where()
    layers = [where, nn.Linear(2, 2)] if mesh.worker == 0 else [Where(), nn.Linear(2, 2)]
    pipe = Pipe(nn.Sequential(*layers), 2, balance=[1, 1], mesh=mesh)
    pipe(torch.ones(4, 2) if pipe.is_first else None, outputs="all").sum().backward()
    return len(where.files)


@pytest.mark.thorough
def test_few_files_between_processes_too(on_ranks: Callable[..., list[Any]]) -> None:
    first, _ = on_ranks(2, files_on_a_rank)
    assert 0 < first <= MOST
