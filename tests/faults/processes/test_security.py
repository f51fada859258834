"""What a job opens to the network is what the documentation says, and nothing that comes from there is unpickled."""

import ipaddress
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import pipework
from pipework import Mesh
from tests.faults.processes.training import small_pipe

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
    pipe = small_pipe(mesh)
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
    pipe = small_pipe(mesh)
    x = torch.randn(4, 8)
    losses = []
    intruder = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
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


UNPICKLES = re.compile(
    r"^\s*(import|from) (pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b"
    r"|(?<!json)\.load\b(?! import)(?!\(.*weights_only=True)|from torch\S* import .*\b(load|save)\b"
    r"|import_module\(.pickle"
    r"|\w_object(_list)?\b|(?<![\w.])(eval|exec)\((?!\))",
    re.MULTILINE,
)
OWN_LOADS = re.compile(r"\b(Plan|Profile|Costs|SkipTracker|skip_tracker\.current\(\)|tracker)\.load\b")


def test_nothing_is_unpickled() -> None:
    """But for `compat`, whose RPC is PyTorch's, and pickles; weights alone may be read."""
    lines = ["import pickle", "torch.load(f)", "dist.gather_object(1)", "from pickle import loads", "eval('1')",
             "read = torch.load", "t.load(f)", "from torch.serialization import load as read"]  # fmt: skip
    assert all(map(UNPICKLES.search, lines))
    for path in sorted(PACKAGE.rglob("*.py")):
        found = UNPICKLES.search(OWN_LOADS.sub("", path.read_text(encoding="utf-8")))
        assert found is None or path.relative_to(PACKAGE).parts[0] == "compat", (path, found)
