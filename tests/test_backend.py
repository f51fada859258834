"""Backends: the local one, and that a further kind of workers needs a file and a line only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipework import Pipe
from pipework import pipe as pipe_module
from pipework.backend import Backend, StepCall
from pipework.model.marks import MicroBatches
from pipework.model.mini_batch import split
from pipework.runtime.random.streams import Key
from pipework.runtime.run_spec import RunSpec
from pipework.runtime.transport import LocalTransport
from pipework.testing import draw_key, reference_step

if TYPE_CHECKING:
    from pipework.runtime.transport import Handler, Message, Receive, Send


def test_one_process_has_everything() -> None:
    backend = Backend()
    call = StepCall(training=True, grad=True, everywhere=False, returns_output=False, recorded=False, has_target=True)
    agreed = backend.begin(call, split((torch.zeros(5, 1),), {}, 2), (), 1)
    assert agreed == call._replace(rows=5, micro_batches=2)
    agreed = backend.begin(call, split((MicroBatches([torch.zeros(2), torch.zeros(())]),), {}, 2), (), None)
    assert (agreed.micro_batches, agreed.given) == (2, [2, -1])
    key = Key()
    backend.share_key(agreed, key)
    assert not key.drawn
    assert backend.rank_of(1) is None
    assert backend.ranks.all_gather_text("own") == ["own"]


def test_a_request_to_stop_is_seen() -> None:
    backend = Backend()
    assert not backend.stopping
    backend.request_stop()
    assert backend.stopping


class CountingEndpoint:
    """Passes messages on, and counts those that it sends."""

    def __init__(self, inner: Any, sent: list[tuple[str, int]]) -> None:
        self._inner = inner
        self._sent = sent

    def sender(self, kind: str, stage: int) -> Send:
        send = self._inner.sender(kind, stage)

        def counted(micro_batch: int, message: Message) -> None:
            self._sent.append((kind, stage))
            send(micro_batch, message)

        return counted

    def receiver(self, kind: str, stage: int) -> Receive:
        return self._inner.receiver(kind, stage)  # type: ignore[no-any-return]

    def handlers(self, of_stage: Mapping[str, Handler]) -> Mapping[str, Handler]:
        return of_stage

    def finish(self) -> None:
        self._inner.finish()


class CountingTransport(LocalTransport):
    """A transport of one's own."""

    def __init__(self, spec: RunSpec, sent: list[tuple[str, int]]) -> None:
        super().__init__(spec.placement, spec.engine.links)
        self.endpoints = {worker: CountingEndpoint(endpoint, sent) for worker, endpoint in self.endpoints.items()}


class CountingBackend(Backend):
    def __init__(self, devices: Any) -> None:
        super().__init__(devices)
        self.sent: list[tuple[str, int]] = []

    def transport(self, spec: RunSpec) -> CountingTransport:
        return CountingTransport(spec, self.sent)


def test_another_backend_is_a_file_and_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CountingBackend(["cpu", "cpu"])
    monkeypatch.setattr(pipe_module, "backend_for", lambda mesh, devices: backend)
    plain = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    x, y = torch.randn(6, 4), torch.randn(6, 2)
    torch.manual_seed(1)
    expected = reference_step(plain, x, y, F.mse_loss, 3, draw_key())
    gradients = [parameter.grad for parameter in plain.parameters()]
    plain.zero_grad()
    pipe = Pipe(plain, 3, balance=[1, 2], devices=["cpu", "cpu"], schedule="1f1b", loss_fn=F.mse_loss)
    torch.manual_seed(1)
    loss = pipe(x, target=y)
    loss.backward()
    assert torch.equal(loss, expected.loss)
    assert all(torch.equal(p.grad, g) for p, g in zip(pipe.parameters(), gradients, strict=True))
    assert backend.sent.count(("F", 1)) == 3
    assert backend.sent.count(("B", 0)) == 3
