"""Whether a pipe computes on the devices of this machine what the plain model computes there.

* `cases`: the ways to train that are tried on a device, or across a link.
* `model`: the model of a case, and the plain model that is its reference.
* `provoke`: long kernels and overwritten memory, so that a missing wait shows.
* `training`: both models are trained for some steps.
* `differences`: what they computed is compared.
* `speed`: how fast a link carries tensors.
* `findings`: what was found, as text and JSON.
* `check`: all of this, for a list of devices and a time.
"""

from pipework.device_check.check import check_devices
from pipework.device_check.findings import CheckedPlace, FailedCase, Findings

__all__ = ["CheckedPlace", "FailedCase", "Findings", "check_devices"]
