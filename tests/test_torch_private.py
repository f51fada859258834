"""PyTorch's private names: they stand in one file, the installed version has them, and most of them can be missed."""

import ast
import json
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pipework
from pipework import torch_private

PACKAGE = Path(pipework.__file__).parent
HOME = PACKAGE / "torch_private.py"
# As the docstring of torch_private has them: public de facto, or methods that subclasses override.
ALLOWED = {"_modules", "_parameters", "_buffers", "_load_from_state_dict", "_check_input_dim"}
WITH_FALLBACK = (
    "torch.autograd.Variable._execution_engine",
    "torch._C._autograd._get_current_graph_task_keep_graph",
    "torch._C._autograd._top_saved_tensors_default_hooks",
    "torch.ops.aten._unsafe_view",
    "torch._C.DisableTorchFunctionSubclass",
    "torch._C._are_functorch_transforms_active",
    "torch._C._len_torch_dispatch_stack",
    "torch._C._len_torch_function_stack",
    "torch._C._is_any_autocast_enabled",
    "torch.Tensor._make_subclass",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.Tensor._base",
    "torch.UntypedStorage._cdata",
    "torch._C._storage_Use_Count",
    "torch.utils._python_dispatch.TorchDispatchMode",
    "torch._C._TorchDispatchModeKey.FAKE",
    "torch._C._get_dispatch_mode",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch._C.DispatchKeySet",
    "torch._C.DispatchKey",
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass",
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    "torch.utils._python_dispatch._push_mode",
    "torch.utils._python_dispatch._pop_mode",
    "torch.overrides._get_current_function_mode_stack",
    "torch.overrides._push_mode",
    "torch.overrides._pop_mode",
    "torch.utils._device.DeviceContext",
    "torch.nn.Module()._forward_hooks",
    "torch.nn.Module()._forward_pre_hooks",
    "torch.nn.Module()._backward_hooks",
    "torch.nn.Module()._backward_pre_hooks",
    "torch.nn.Module()._non_persistent_buffers_set",
    "torch.nn.Module._save_to_state_dict",
    "torch.nn.Module._compiled_call_impl",
    "torch.nn.RNNBase._init_flat_weights",
    "torch.nn.modules.batchnorm._BatchNorm",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.utils._foreach_utils._group_tensors_by_device_and_dtype",
    "torch.utils._foreach_utils._has_foreach_support",
    "torch._foreach_norm",
    "torch._foreach_mul_",
    "torch.nn.utils.clip_grad._clip_grads_with_norm_",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch.distributed.ProcessGroupGloo._Options",
)
WITHOUT_FALLBACK = (
    "torch.Tensor._version",
    "torch.Tensor._values",
    "torch.nn.Module._apply",
    "torch._C._dispatch_get_all_op_names",
    "torch._C._dispatch_has_kernel_for_dispatch_key",
    "torch._C._get_schema",
    "torch.utils._pytree",
    "torch.distributed.distributed_c10d._abort_process_group",
)
# Attributes that are read or set where they are used, so that nothing fails without them; each with an object.
ON_OBJECTS = {
    "_devices": lambda: torch.distributed.ProcessGroupGloo._Options,
    "_timeout": lambda: torch.distributed.ProcessGroupGloo._Options,
    "_start_coalescing": lambda: torch._C._distributed_c10d.Backend,
    "_end_coalescing": lambda: torch._C._distributed_c10d.Backend,
    "_flat_weight_refs": lambda: nn.RNN(1, 1),
    "_reset_parameters": lambda: nn.MultiheadAttention(1, 1),
    "_sleep": lambda: torch.cuda,
    "_wrapped_call_impl": nn.Module,
    "_call_impl": nn.Module,
    "_metadata": lambda: nn.Module().state_dict(),
    "_schema": lambda: torch.ops.aten.add.Tensor,
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


def members_of_pytorch() -> set[str]:
    owners = (
        Tensor, nn.Module(), nn.RNN(1, 1), nn.BatchNorm1d(1), torch.UntypedStorage, torch.Generator, torch.library,
        torch.autograd.graph.Node, torch.distributed.ProcessGroup,
    )  # fmt: skip
    return {name for owner in owners for name in dir(owner) if is_private(name)} | {*ON_OBJECTS, *IN_FILES}


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


def test_every_private_name_of_that_file_is_listed_here() -> None:
    tree = ast.parse(HOME.read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    names = Names.of(tree)
    used = {part for text in texts if " " not in text for part in text.split(".") if is_private(part)}
    used |= {name for _, name in names.attributes} | {
        part for path in names.imported.values() for part in path.split(".")
    }
    listed = {part for path in WITH_FALLBACK + WITHOUT_FALLBACK for part in path.split(".")} | {*ON_OBJECTS, *IN_FILES}
    assert {name for name in used if is_private(name)} - names.made - listed - ALLOWED - OURS == set()


def found(path: str) -> Any:
    value: Any = torch
    for part in path.split(".")[1:]:
        value = value() if part == "" else getattr(value, part.removesuffix("()"))
        value = value() if part.endswith("()") else value
    return value


@pytest.mark.parametrize("path", WITH_FALLBACK + WITHOUT_FALLBACK)
def test_the_installed_pytorch_has(path: str) -> None:
    assert found(path.rpartition(".")[0]) is not None
    assert hasattr(found(path.rpartition(".")[0]), path.rpartition(".")[2]), f"{torch.__version__} has no {path}"


@pytest.mark.parametrize("name", ON_OBJECTS)
def test_the_installed_pytorch_has_the_attribute(name: str) -> None:
    assert hasattr(ON_OBJECTS[name](), name), f"{torch.__version__} has no {name}"


@pytest.mark.parametrize("name", IN_FILES)
def test_the_installed_pytorch_uses(name: str) -> None:
    assert name in (Path(torch.__file__).parent / IN_FILES[name]).read_text(), f"{torch.__version__} has no {name}"


WITHOUT_ONE = '''
import gc, json, os, sys
from importlib.machinery import SourceFileLoader
import torch, torch.nn.modules.batchnorm, torch.utils._device, torch.utils._foreach_utils, torch.utils.checkpoint
from torch import nn

torch.set_num_threads(1)
RULES = "1f1b", "zb-h1"

class Gone:
    def __get__(self, instance, owner):
        raise AttributeError

def take_away(path):
    """Removes a name; returns what puts it back."""
    above, name = path.rsplit(".", 1)
    if above.endswith("()"):
        init = nn.Module.__init__
        def without(self):
            init(self)
            self.__dict__.pop(name)
        nn.Module.__init__ = without
        return lambda: setattr(nn.Module, "__init__", init)
    owner = eval(above)
    value = getattr(owner, name)
    if isinstance(owner, type):
        own = owner.__dict__.get(name, owner)
        setattr(owner, name, Gone())
        return lambda: delattr(owner, name) if own is owner else setattr(owner, name, own)
    if above == "torch.ops.aten":
        setattr(owner, name, None)
    else:
        delattr(owner, name)
    loaded = sys.modules.get(path)
    if loaded is not None:
        sys.modules[path] = None
    def put_back():
        setattr(owner, name, value)
        if loaded is not None:
            sys.modules[path] = loaded
    return put_back

def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.BatchNorm1d(8), nn.Linear(8, 2))

def train(model, step):
    x, target = torch.arange(24.0).reshape(6, 4) / 24, torch.ones(6, 2)
    loss = step(model, x, target)
    return [loss.detach(), *(parameter.grad for parameter in model.parameters()), *model.buffers()]

def plain(model, x, target):
    total = 0
    for part, of in zip(x.tensor_split(3), target.tensor_split(3)):
        loss = nn.functional.mse_loss(model(part), of) / 3
        loss.backward()
        total = total + loss.detach()
    return total

def piped(model, x, target):
    loss = model(x, target=target)
    loss.backward()
    return loss

def outcome(path, expected):
    put_back = take_away(path)
    try:
        import pipework
        from pipework import Pipe
    finally:
        put_back()
    for rule in RULES:
        pipe = pipework.Pipe(layers(), chunks=3, balance=[2, 2], devices=["cpu"] * 2, schedule=rule,
                             loss_fn=nn.functional.mse_loss)
        for one, two in zip(train(pipe, piped), expected, strict=True):
            assert torch.equal(one, two), rule
    return "trained"

# Only what does not know PyTorch stays loaded; the rest is imported anew for each name, from code that is kept.
compiled, get_code = {}, SourceFileLoader.get_code
SourceFileLoader.get_code = lambda loader, name: compiled.get(name) or compiled.setdefault(name, get_code(loader, name))
import pipework, pipework.pipe
for module in list(sys.modules):
    if module.partition(".")[0] == "pipework" and not module.startswith("pipework.schedule"):
        del sys.modules[module]
gc.disable()  # a collection would copy all memory that a fork shares
for path in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        try:
            said = outcome(path, train(layers(), plain))
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        print(json.dumps([path, said]))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
'''


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """What one process after the other, each without one of the names, makes of `import pipework` and a step."""
    names = json.dumps(WITH_FALLBACK + WITHOUT_FALLBACK)
    done = subprocess.run([sys.executable, "-c", WITHOUT_ONE, names], capture_output=True, text=True, check=True)
    return dict(map(json.loads, done.stdout.splitlines()))


@pytest.mark.parametrize("path", WITH_FALLBACK)
def test_without_it_a_pipe_still_trains_exactly(path: str, outcomes: dict[str, str]) -> None:
    assert outcomes[path] == "trained"


@pytest.mark.parametrize("path", WITHOUT_FALLBACK)
def test_without_it_the_error_says_so(path: str, outcomes: dict[str, str]) -> None:
    name = path.replace("torch.nn.Module", "Module").replace("torch.Tensor", "Tensor")
    assert outcomes[path] == "trained" or f"PyTorch {torch.__version__} has no {name}" in outcomes[path]


def test_what_a_node_has_saved_is_found_without_calling_hooks() -> None:
    x, unpacked = torch.ones(3, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (7, tensor), unpacked.append):
        hooked = x.exp()
    plain = x.exp()
    (saved,) = torch_private.saved_by(plain.grad_fn)
    assert saved.data_ptr() == plain.data_ptr()
    ((number, packed),) = torch_private.saved_by(hooked.grad_fn)
    assert (number, packed.data_ptr(), unpacked) == (7, hooked.data_ptr(), [])
    plain.sum().backward()
    assert torch_private.saved_by(plain.grad_fn) in ([], [None])


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
    assert torch_private.dispatch_modes() == []
