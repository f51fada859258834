"""The page of errors: the package has a message for all that it lists, and a test expects that message.

The errors that its code blocks show are raised by `test_blocks.py`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "errors.md").read_text()

# The first cell of each row of the table, and words of the message.
REFUSED = {
    "a layer that uses a parameter through a list or a closure": "without reading it from its module",
    "overwriting a stashed tensor in place": "still to be popped",
    "an object of an unknown class, a set or a function that holds a tensor with a gradient": "register_pytree_node",
    "a norm with running statistics in two partitions": "put them into one partition",
    "an `nn.Sequential` with a forward, parameters, buffers or hooks of its own": "pipe of its layers would leave out",
    "a layer draws from Python's `random`, numpy or a `torch.Generator` of its own, or counts calls": "another output",
    "`optimizer.step()` between forward and backward, with the loss outside": "modified by an inplace operation",
    "`attach` to a model whose loss mixes rows, is a sum, or counts other labels than the weights say": (
        " of the sample is "
    ),
    "`attach` with a sample of one row": "nothing shows whether ",
    "a `loss_fn` that is a module with parameters": "make it the last layer",
    "a schedule whose backwards are not in ascending order": "in another order than 0, 1, 2, ",
    "a target on the first rank only": "a target was given on the first rank of the pipe",
    "an input that requires a gradient on some rank, and not on the first": "an input requires a gradient on rank ",
    "changing a popped tensor in place while another stage pops it, too": "another stage has popped it, too",
    "a list, an array or an object with an entry for each row, as input or target": "as many as the batch has rows",
    "a sparse or nested tensor that would be split": "only dense tensors are split",
    "outputs that are nested differently for each micro-batch": "micro-batch 0 gave ",
    "with `graphs=`, a layer that waits for its device, or looks at values": "cannot be captured as a graph",
    "a loss computed from a tensor that a layer has kept on itself": "outside of the pipe's own backward",
}
# What the section on warnings names, and words of the warning.
WARNED_OF = {
    "one micro-batch for several workers": "chunks is 1",
    "in training mode, unless": "normalises with the rows of its micro-batch, and",
    "hooks of a partition": "has hooks, which are not called",
    "a pipe without the mesh": "this pipe has no mesh: each process trains",
    "losses on which backward() is never called": "loss.backward() was called on none of the first ",
    "targets are padded unequally": "loss_weight=lambda target: (target != ",
    "is no mean over rows": "mean over rows",
    "an input": "shape does not show that these are its rows",
    "or a module": "takes dimension 1 for the batch",
    "an output": "joins along",
}


def strings(folder: str) -> Iterator[str]:
    """The strings in the files of a folder but docstrings; in patterns, what follows a backslash stands for itself."""
    for path in (ROOT / folder).rglob("*.py"):
        if path != Path(__file__):
            nodes = list(ast.walk(ast.parse(path.read_text())))
            alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
            for node in nodes:
                if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in alone:
                    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
                    values = [part.value for part in parts if isinstance(part, ast.Constant)]
                    yield re.sub(r"\\(\W)", r"\1", "\0".join(each for each in values if isinstance(each, str)))


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}")[2].partition("\n## ")[0]


def test_every_row_is_listed_here() -> None:
    rows = re.findall(r"^\| (.+?) \|", section("Refused"), re.MULTILINE)
    assert rows == ["what", *REFUSED]


def test_the_warnings_are_named() -> None:
    paragraph = " ".join(section("Warnings").split())
    assert [name for name in WARNED_OF if name not in paragraph] == []


@pytest.mark.parametrize("folder", ["pipework", "tests"])
def test_the_package_says_so_and_a_test_expects_it(folder: str) -> None:
    said = "\n".join(strings(folder))
    assert [words for words in (*REFUSED.values(), *WARNED_OF.values()) if words not in said] == []
