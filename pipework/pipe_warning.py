"""The category of the warnings of a pipe."""


class PipeWarning(UserWarning):
    """Something that a pipe does is probably not what was meant: it runs, but slower, or on other data.

    Each is given once for a pipe, and says what to do. If it is meant, `warnings.filterwarnings` ignores it by this
    category, and by the words that it begins with if others are to be seen.

    Example:
        >>> import warnings
        >>> from torch import nn
        >>> from pipework import Pipe
        >>> with warnings.catch_warnings():
        ...     warnings.filterwarnings("ignore", "chunks is 1", PipeWarning)
        ...     pipe = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), devices=["cpu", "cpu"])
    """

    __module__ = "pipework"  # the public name, for messages
