"""Whether a pipe computes on the devices of this machine what the plain model computes there.

* `training`: the ways to train that are tried on a device, or across a link between two. A pipe and the plain model are
  trained, while streams are delayed and used memory is overwritten.
* `check`: runs the cases of a list of devices for a given time.
"""

from pipework.device_check.check import CheckedPlace, check_devices

__all__ = ["CheckedPlace", "check_devices"]
