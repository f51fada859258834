"""One rank of a test: calls a function of a test module with the mesh that `pipework.init` gives it."""

import importlib.util
import json
import sys
import warnings
from pathlib import Path

import torch

import pipework


def main() -> None:
    path, function, settings, arguments = sys.argv[1:]
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # classes are found by the name of their module
    spec.loader.exec_module(module)
    # What PyTorch imports for its first optimizer takes long on a busy machine, and keeps other threads waiting.
    torch.optim.SGD([torch.zeros(1)])
    mesh = pipework.init(**json.loads(settings))
    torch.manual_seed(0)
    result = getattr(module, function)(mesh, **json.loads(arguments))
    print("\nRESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
