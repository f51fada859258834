"""Runs old scripts: adapters for `torch.distributed.pipeline.sync`, torchgpipe and fairscale's `Pipe`.

    import pipework.compat
    pipework.compat.install()                                  # then the old import lines find the adapters
    from torch.distributed.pipeline.sync import Pipe

or, without touching the script, `python -m pipework.compat script.py`. The adapters can also be imported under their
own names: `pipework.compat.sync`, `pipework.compat.torchgpipe`, `pipework.compat.fairscale`.
"""

from pipework.compat.installing import install
from pipework.compat.state_dicts import convert_state_dict

__all__ = ["convert_state_dict", "install"]
