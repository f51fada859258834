"""The runtime without one of its waits: each statement that orders streams, keeps memory or moves a generator, by name.

The statements are found in the source, so a new one is a new mutant.
"""

import __future__

import ast
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import pipework

# Calls whose result nobody uses: without them, a program goes on as if nothing were missing.
CALLS = {
    "enter_thread",
    "hand_over",
    "record_on",
    "record_stream",
    "set_device_index",
    "hold.move",
    "self.generator.set",
    "self.set",
    "self._host.release",
    "self.release",
    "put_state",
    "stream.keep_state_on",
    "set_stream",
    "synchronize",
    "wait_event",
    "wait_for_caller",
    "wait_stream",
}
REPLACED = {
    # The buffers are free when the L starts, and not when it has ended.
    "self._coming[action[2]] = (stored, event)": "self._coming[action[2]] = (None, event)",
    # A step begins when the worker has launched the gradients, and not when they are there.
    "event = ready or torch.accelerator.current_stream(self._down.device).record_event()": (
        "event = torch.accelerator.current_stream(self._down.device).record_event()"
    ),
}
ENTERED = {"stream", "hold", "self._hold"}  # other contexts have nothing to do with devices
FOLDERS = ("autograd", "model", "runtime")
OF_CUDA = {"device_graphs.py"}  # simulated devices have a stand-in for it


@dataclass(frozen=True)
class Mutant:
    """A function without one of its statements.

    Attributes:
        module: where the function is.
        function: its name, with that of its class.
        statement: what is left out.
        line: its line in the file.
    """

    module: str
    function: str
    statement: str
    line: int

    def __str__(self) -> str:
        return f"{self.module.removeprefix('pipework.')}:{self.function}: {self.statement}"

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the function until the test ends."""
        module = importlib.import_module(self.module)
        *holders, name = self.function.split(".")
        owner: Any = module
        for holder in holders:
            owner = getattr(owner, holder)
        definition = next(node for function, node in functions(module) if function == self.function)
        Remove(self.line).visit(definition)
        namespace: dict[str, Any] = {}
        tree = ast.fix_missing_locations(ast.Module([definition], []))
        code = compile(tree, f"<{self}>", "exec", flags=__future__.annotations.compiler_flag, dont_inherit=True)
        exec(code, vars(module), namespace)
        mutated = namespace[name]
        if isinstance(mutated, cached_property):
            mutated.__set_name__(owner, name)
        monkeypatch.setattr(owner, name, mutated)


class Remove(ast.NodeTransformer):
    """Puts `pass` in the place of the statement in a line, its body in that of a `with`, and what `REPLACED` has."""

    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self._line else node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        return ast.parse(REPLACED[ast.unparse(node)]).body[0] if node.lineno == self._line else node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        return node.body if node.lineno == self._line else self.generic_visit(node)


def functions(module: ModuleType) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions and methods of a module."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{each.name}", each) for each in node.body if isinstance(each, ast.FunctionDef))


def _named(statement: ast.AST) -> str | None:
    """The text of a statement that is to be left out; None: it is to stay."""
    if isinstance(statement, ast.With):
        entered = [ast.unparse(item) for item in statement.items]
        return f"with {entered[0]}" if len(entered) == 1 and entered[0] in ENTERED else None
    if isinstance(statement, ast.Assign):
        return text if (text := ast.unparse(statement)) in REPLACED else None
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return None
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    entered = [ast.unparse(argument) for argument in statement.value.args] if name == "enter_context" else []
    ordering = not CALLS.isdisjoint({name, ast.unparse(function)}) or (len(entered) == 1 and entered[0] in ENTERED)
    return ast.unparse(statement) if ordering else None


def mutants() -> list[Mutant]:
    """All of them, in the order of the files and lines."""
    package = Path(pipework.__file__).parent
    files = sorted(file for folder in FOLDERS for file in (package / folder).rglob("*.py") if file.name not in OF_CUDA)
    names = [".".join(("pipework", *file.relative_to(package).with_suffix("").parts)) for file in files]
    return [
        Mutant(name, function, text, statement.lineno)
        for name in names
        for function, definition in functions(importlib.import_module(name.removesuffix(".__init__")))
        for statement in ast.walk(definition)
        if (text := _named(statement))
    ]
