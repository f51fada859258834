"""PyTorch's private names: they stand in one file, and the error says so if the installed version has not got one."""

import ast
import pkgutil
import re
import runpy
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pipework
from pipework import torch_private

PACKAGE = Path(pipework.__file__).parent
HOME = PACKAGE / "torch_private.py"
# As the docstring of torch_private has them: public de facto, or methods that subclasses override.
ALLOWED = {"_modules", "_parameters", "_buffers", "_load_from_state_dict", "_check_input_dim"}
# Attributes that are read or set if they exist, so that nothing fails without them; each with an object.
ON_OBJECTS = {
    "_reset_parameters": lambda: nn.MultiheadAttention(1, 1),
    "_sleep": lambda: torch.cuda,
    "_wrapped_call_impl": nn.Module,
    "_call_impl": nn.Module,
    "_metadata": lambda: nn.Module().state_dict(),
    "_dispatch_key": lambda: torch.utils._python_dispatch.TorchDispatchMode(
        _dispatch_key=torch._C.DispatchKey.PreDispatch
    ),
}
# Those of classes that take long to import, or that PyTorch asks for by name; each with a file that has it.
IN_FILES = {
    "_is_param": "nn/parameter.py",
    "_mode_key": "_subclasses/fake_tensor.py",
    "_orig_mod": "_dynamo/eval_frame.py",
    "_dynamo": "__init__.py",
    "_random": "distributed/tensor/_dispatch.py",
    "_rng_tracker": "distributed/tensor/_random.py",
    "_distribute_region": "distributed/tensor/_random.py",
    "_functorch": "_functorch/_aot_autograd/runtime_wrappers.py",
}
# Private names of Python's own, and two of this package that PyTorch has, too.
OURS = {"_replace", "_asdict", "_fields", "_exit", "_current_frames", "_getframe", "_SubParsersAction"}
NOT_PYTORCHS = {
    "autograd/weight_split/operation.py": {"_version"},
    "integrations/sketch.py": {"_keys_to_ignore_on_save"},
    "integrations/transformers.py": {"_active_collector", "_init_weights"},
}


def is_private(name: str) -> bool:
    return re.fullmatch("_[A-Za-z]\\w*", name) is not None


def looked_up(tree: ast.AST) -> dict[str, set[str]]:
    """The names that a file looks up before it uses them, by their owner."""
    found: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id="require"), args=[owner, ast.Constant(value=str(names))]):
                found.setdefault(ast.unparse(owner).strip("'"), set()).update(names.split())
            case ast.Call(func=ast.Name(id="_private"), args=[ast.Constant(value=str(path))]):
                found.setdefault("torch", set()).add(path.removeprefix("torch."))
    return found


def members_of_pytorch() -> set[str]:
    owners = (
        Tensor, nn.Module(), nn.RNN(1, 1), nn.BatchNorm1d(1), torch.UntypedStorage, torch.Generator, torch.library,
        torch.autograd.graph.Node, torch.distributed.ProcessGroup,
    )  # fmt: skip
    found = {name for owner in owners for name in dir(owner)}
    for paths in looked_up(ast.parse(HOME.read_text())).values():
        found |= {path.split(".")[-1] for path in paths}
    return set(filter(is_private, found)) | {*ON_OBJECTS, *IN_FILES}


@dataclass
class Names:
    """The private names in one file."""

    made: set[str]  # by the file, so that an attribute of that name may well be of this package
    attributes: set[tuple[str, str]]  # the first part of an expression, and its last
    imported: dict[str, str]  # from PyTorch, with where they come from
    texts: set[str]

    @classmethod
    def of(cls, tree: ast.Module) -> "Names":
        found = cls(set(), set(), {}, set())
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                    found.made.add(name)
                case ast.Attribute(attr=name, ctx=ctx) if is_private(name):
                    root = node.value
                    while isinstance(root, ast.Attribute | ast.Subscript | ast.Call):
                        root = root.func if isinstance(root, ast.Call) else root.value
                    found.attributes.add((ast.unparse(root), name))
                    found.made |= {name} if isinstance(ctx, ast.Store) else set()
                case ast.Constant(value=str(text)) if is_private(text):
                    found.texts.add(text)
                case ast.Import():
                    names = [each for each in node.names if each.name.split(".")[0] == "torch"]
                    found.imported |= {each.asname or "torch": each.name for each in names}
                case ast.ImportFrom(module=str(module)) if module.split(".")[0] == "torch":
                    found.imported |= {each.asname or each.name: f"{module}.{each.name}" for each in node.names}
        return found

    def of_pytorch(self, ours: set[str], members: set[str]) -> set[str]:
        """Those that are PyTorch's.

        Args:
            ours: what the package defines.
            members: the private attributes of PyTorch's objects.
        """
        found = {origin for origin in self.imported.values() if any(map(is_private, origin.split(".")))}
        for root, name in self.attributes:
            itself = root in ("self", "cls", "super")
            if root in self.imported or (name in members and not itself) or name not in ours | members:
                found.add(name)
        return (found | (self.texts & members)) - ALLOWED


def test_private_names_stand_in_one_file() -> None:
    paths = [path for path in PACKAGE.rglob("*.py") if path not in (HOME, PACKAGE / "fsdp_private.py")]
    names = {path.relative_to(PACKAGE).as_posix(): Names.of(ast.parse(path.read_text())) for path in paths}
    ours, members = OURS.union(*(each.made for each in names.values())), members_of_pytorch()
    found = {path: each.of_pytorch(ours, members) - NOT_PYTORCHS.get(path, set()) for path, each in names.items()}
    assert not {path: wrong for path, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    "code",
    [
        "from torch.utils import _pytree as tree",
        "from torch._dynamo import OptimizedModule",
        "import torch\ntorch._C._get_schema('a', 'b')",
        "from torch import Tensor\ndef f(x: Tensor):\n    return x._version",
        "from torch import nn\ndef f(module):\n    return getattr(module, '_forward_hooks')",
        "def f(group):\n    return group._set_sequence_number_for_group()",
    ],
)
def test_the_search_finds(code: str) -> None:
    assert Names.of(ast.parse(code)).of_pytorch(set(), members_of_pytorch())


def test_every_private_name_of_that_file_is_looked_up() -> None:
    tree = ast.parse(HOME.read_text())
    channel = PACKAGE / "distributed/transport/channel.py"  # looks up those of NCCL when it connects
    names, lookups = Names.of(tree), looked_up(tree) | looked_up(ast.parse(channel.read_text()))
    used = names.texts | {name for _, name in names.attributes}
    used |= {part for path in names.imported.values() for part in path.split(".")}
    known = {part for owner, paths in lookups.items() for path in (owner, *paths) for part in path.split(".")}
    known |= {*ON_OBJECTS, *IN_FILES} | ALLOWED | OURS
    assert {name for name in used if is_private(name)} - names.made - known == set()


def test_all_that_nested_values_need_is_looked_up() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    used: set[str] = set()
    for node in (node for text in texts if "pytree" in text for node in ast.walk(ast.parse(text))):
        match node:
            case ast.Attribute(value=ast.Name("pytree") | ast.Attribute(attr="pytree"), attr=name):
                used.add(name)
    assert used == looked_up(ast.parse(HOME.read_text()))["torch.utils._pytree"]


@pytest.mark.parametrize("name", ON_OBJECTS)
def test_the_installed_pytorch_has_the_attribute(name: str) -> None:
    assert hasattr(ON_OBJECTS[name](), name), f"{torch.__version__} has no {name}"


@pytest.mark.parametrize("name", IN_FILES)
def test_the_installed_pytorch_uses(name: str) -> None:
    assert name in (Path(torch.__file__).parent / IN_FILES[name]).read_text(), f"{torch.__version__} has no {name}"


class Gone:
    def __get__(self, instance: object, owner: type) -> None:
        raise AttributeError


def test_without_one_the_import_says_so() -> None:
    for owner, name in (
        ("torch._C", "_dispatch_get_all_op_names"),
        ("torch.Tensor", "_version"),
        ("torch.utils._pytree", "tree_leaves"),
        ("torch.nn.Module", "_apply"),
    ):
        path = f"{'Module' if owner.endswith('Module') else owner}.{name}"
        with pytest.MonkeyPatch.context() as patch:
            if owner == "torch.Tensor":
                patch.setattr(Tensor, name, Gone())  # it belongs to a class above, from which it cannot be deleted
            else:
                patch.delattr(pkgutil.resolve_name(owner), name)
            with pytest.raises(ImportError, match=f"has no {re.escape(path)}, which pipework uses: install a version"):
                runpy.run_path(str(HOME))


def test_without_it_the_feature_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(nn.utils.clip_grad, "_clip_grads_with_norm_")
    runpy.run_path(str(HOME))  # not all pipes need it
    with pytest.raises(ImportError, match=r"has no torch\.nn\.utils\.clip_grad\._clip_grads_with_norm_, which"):
        torch_private.before_clip_grad_norm(lambda parameters: None)


def test_modes_of_two_threads_leave_no_trace() -> None:
    """PyTorch's own `with` notes in the process that a mode is entered; two threads can leave that note behind."""
    both_inside, first_left = threading.Barrier(2), threading.Event()
    later = torch_private.ThreadDispatchMode()

    def second() -> None:
        both_inside.wait()
        with later:
            both_inside.wait()
            first_left.wait()

    thread = threading.Thread(target=second)
    thread.start()
    with torch_private.ThreadDispatchMode():
        both_inside.wait()
        both_inside.wait()
    first_left.set()
    thread.join()
    assert not torch.utils._python_dispatch.is_in_torch_dispatch_mode()
    assert torch_private.modes() == []
