from types import SimpleNamespace

import pytest
import torch

import pipework
from pipework.cli import env, main


def report(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(": ") for line in lines)}


def test_report(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    facts = report(capsys)
    assert facts["pipework"] == pipework.__version__
    assert int(facts["cores"]) >= 1
    assert facts["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert facts["PyTorch version"] == torch.__version__
    assert {"safetensors", "transformers", "Python version", "GPU models and configuration"} <= set(facts)


@pytest.mark.parametrize("error", [ImportError, OSError])
def test_without_a_whole_torch(capsys, monkeypatch, error):
    def broken(module):
        if module.startswith("torch"):
            raise error("libtorch.so: cannot open shared object file")
        return SimpleNamespace(__version__="1")

    monkeypatch.setattr(env, "import_module", broken)
    told = report(capsys)["PyTorch's report cannot be made"]
    assert told == f"{error.__name__}: libtorch.so: cannot open shared object file"
