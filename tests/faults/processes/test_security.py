"""What a job opens to the network is what the documentation says, and nothing that comes from there is unpickled."""

import ast
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import pipework
from pipework import Mesh, Pipe
from tests.faults.processes.training import mean_square, model

Run = Callable[..., list[Any]]
PACKAGE = Path(pipework.__file__).parent
LISTENS = "0A"


def listening() -> list[tuple[str, int]]:
    """The addresses and ports on which this process listens."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                words = bytes.fromhex(address)
                raw = b"".join(words[n : n + 4][::-1] for n in range(0, len(words), 4))
                found.append((str(ipaddress.ip_address(raw)), int(port, 16)))
    return found


def opens(mesh: Mesh) -> list[tuple[str, int]]:
    pipe = Pipe(model(), chunks=2, schedule="1f1b", loss_fn=mean_square, mesh=mesh)
    pipe(torch.randn(4, 8), target=torch.randn(4, 8)).backward()
    return listening()


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="only Linux lists its sockets there")
def test_only_documented_sockets_listen(start: Callable[..., Any]) -> None:
    job = start(2, opens, own_store=True)
    ended = job.ended()
    assert [each.code for each in ended] == [0, 0], [each.errors for each in ended]
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)} | {"127.0.0.1", "::1"}
    for rank, each in enumerate(ended):
        everywhere = [port for address, port in each.result if ipaddress.ip_address(address).is_unspecified]
        # The store of rank 0, unless a launcher has it, on all interfaces; gloo on that of the machine's name.
        assert len(set(everywhere)) == (1 if rank == 0 else 0), each.result
        others = {address.removeprefix("::ffff:") for address, port in each.result if port not in everywhere}
        assert others <= addresses, each.result


def trains_beside_garbage(mesh: Mesh, port: int) -> list[float]:
    """Rank 0 writes garbage wherever pipework looks, while all train."""
    pipe = Pipe(model(), chunks=2, schedule="1f1b", loss_fn=mean_square, mesh=mesh)
    x = torch.randn(4, 8)
    losses = []
    intruder = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    prefix = ""
    store: Any = mesh.store
    while hasattr(store, "underlying_store"):
        prefix = f"{store.prefix}/{prefix}" if hasattr(store, "prefix") else prefix
        store = store.underlying_store
    keys = [key for key in intruder.list_keys() if "/monitor/" in key]
    assert {key.rsplit("/monitor/", 1)[1].split("/")[0] for key in keys} <= {"heartbeat", "changed"}
    assert any(key.endswith("/monitor/heartbeat/0") for key in keys), keys
    place = keys[0].rsplit("/monitor/", 1)[0] + "/monitor/"
    evil = [b"cos\nsystem\n(S'touch /tmp/no'\ntR.", b"[" * 10_000, b'{"rank": 0}', b"\xff" * 1000, b'"text"', b"{}"]
    for step in range(12):
        if mesh.rank == 0:
            for rank in range(2):
                intruder.set(f"{place}heartbeat/{rank}", evil[step % len(evil)])
            intruder.set(place + "changed", f"garbage {step}")
        loss = pipe(x, target=x)
        loss.backward()
        losses.append(loss.item())
    return losses


def test_garbage_in_the_store_is_ignored(start: Callable[..., Any]) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    environment = {"MASTER_PORT": str(server.port)}
    ended = start(2, trains_beside_garbage, environment=environment, port=server.port).ended()
    assert [each.code for each in ended] == [0, 0], [each.errors for each in ended]
    assert ended[0].result == ended[1].result
    assert len(ended[0].result) == 12


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}


def loads_weights_only(node: ast.AST) -> bool:
    """Whether this is a call of `torch.load` that builds tensors and containers of them, and nothing else."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr="load"), keywords=keywords):
            return any(ast.unparse(each) == "weights_only=True" for each in keywords)
    return False


def unpicklers(tree: ast.AST, *, may_load_weights: bool = False) -> Iterator[str]:
    """Everything that could unpickle."""
    nodes = list(ast.walk(tree))
    allowed = {id(node.func) for node in nodes if may_load_weights and loads_weights_only(node)}
    for node in nodes:
        match node:
            case ast.Attribute() if id(node) in allowed:
                pass
            case ast.Import(names=names):
                yield from (each.name for each in names if each.name.split(".")[0] in FORBIDDEN)
            case ast.ImportFrom(module=module, names=names):
                if module is not None and module.split(".")[0] in FORBIDDEN:
                    yield module
                yield from (each.name for each in names if each.name.endswith(("_object", "_object_list")))
                if module == "torch":
                    yield from (f"torch.{each.name}" for each in names if each.name in ("load", "save"))
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                yield "torch.load"
            case ast.Attribute(attr=name) if name.endswith(("_object", "_object_list")):
                yield name
            case ast.Call(func=ast.Name(id="eval" | "exec" as name)):
                yield name


@pytest.mark.parametrize(
    "line", ["import pickle", "torch.load(f)", "dist.gather_object(1)", "from pickle import loads", "eval('1')"]
)
def test_what_is_looked_for_is_found(line: str) -> None:
    assert list(unpicklers(ast.parse(line)))


def test_loading_weights_alone_is_told_from_loading_anything() -> None:
    calls = ast.parse("torch.load(f, weights_only=True)"), ast.parse("torch.load(f, weights_only=False)")
    assert [list(unpicklers(call, may_load_weights=True)) for call in calls] == [[], ["torch.load"]]


def test_nothing_is_unpickled() -> None:
    """But for `compat`, whose RPC is PyTorch's, and pickles; `integrations` read the weights of other libraries."""
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = path.relative_to(PACKAGE).parts[0]
        if folder != "compat":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert not list(unpicklers(tree, may_load_weights=folder == "integrations")), path
