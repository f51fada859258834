"""What graphs take for granted of layers: tensors that the host reads count with their values."""

import torch
from torch import nn

from pipework.runtime.graphs.fingerprint import Fingerprint


def test_a_tensor_beside_the_devices_may_not_change() -> None:
    layer = nn.Linear(2, 2)
    layer.scale = torch.ones(())  # multiplies as a number, which is in the graph
    on_device, elsewhere = Fingerprint([("0", layer)], {"cpu"}), Fingerprint([("0", layer)], {"cuda"})
    assert not elsewhere.difference()
    layer.scale.fill_(2.0)
    assert not on_device.difference()
    assert elsewhere.difference() == "attribute 'scale' of layer '0' (Linear), a tensor on cpu, was changed"
