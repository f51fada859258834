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


def test_an_attribute_may_not_be_replaced() -> None:
    """A tuple, or a function, is an object that a forward may read, too."""
    layer = nn.Linear(2, 2)
    for name, before, after in (("window", (1, 2), (3, 2)), ("activation", torch.tanh, torch.sigmoid)):
        setattr(layer, name, before)
        fingerprint = Fingerprint([("0", layer)], {"cuda"})
        assert not fingerprint.difference()
        setattr(layer, name, after)
        assert fingerprint.difference() == f"attribute {name!r} of layer '0' (Linear) was replaced"
