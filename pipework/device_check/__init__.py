"""Whether a pipe computes on the devices of this machine what the plain model computes there.

* `cases`: the ways to train that are tried on a device, or across a link between two.
* `training`: trains a pipe and the plain model, while streams are delayed and used memory is overwritten.
* `check`: runs the cases of a list of devices for a given time.
"""

from pipework.device_check.check import CheckedPlace, Findings, check_devices

__all__ = ["CheckedPlace", "Findings", "check_devices"]
