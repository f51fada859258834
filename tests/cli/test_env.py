import sys
from types import SimpleNamespace

import pytest
import torch

import pipework
from pipework.cli import env, main


def report(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(": ") for line in lines)}


def test_report(capsys):
    facts = report(capsys)
    assert facts["pipework"] == pipework.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert facts["torch"] == torch.__version__
    assert facts["intra-op threads"] == str(torch.get_num_threads())
    assert facts["gloo"] == ("available" if torch.distributed.is_gloo_available() else "not available")
    assert facts["nccl"] == ("available" if torch.distributed.is_nccl_available() else "not available")
    assert int(facts["cores"]) >= 1
    assert {"platform", "accelerators", "numpy", "safetensors"} <= set(facts)


@pytest.mark.parametrize("name", ["torch", "torch._C"])
def test_without_a_whole_torch(capsys, monkeypatch, name):
    def broken(module):
        if module == "torch":
            raise ImportError("libtorch.so: cannot open shared object file", name=name)
        return SimpleNamespace(__version__="1")

    monkeypatch.setattr(env, "import_module", broken)
    facts = report(capsys)
    assert facts["torch"] == "cannot be imported: libtorch.so: cannot open shared object file"
    assert "gloo" not in facts


def test_a_report_of_accelerators_has_what_lies_below_pytorch(capsys, monkeypatch):
    def too_old(index):
        if index:
            raise RuntimeError("driver too old\nand more")
        return (8, 0)

    module = SimpleNamespace(
        get_device_name=lambda index: f"Card {index}",
        get_device_capability=too_old,
        mem_get_info=lambda index: (2**30, 2**32),
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
    )
    accelerator = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_accelerator=lambda: SimpleNamespace(type="cuda")
    )
    fake = SimpleNamespace(
        __version__="2",
        accelerator=accelerator,
        cuda=module,
        version=SimpleNamespace(cuda="12.8", hip=None),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91000)),
        distributed=SimpleNamespace(is_gloo_available=lambda: True, is_nccl_available=lambda: True),
        get_num_threads=lambda: 4,
        get_float32_matmul_precision=lambda: "highest",
    )
    monkeypatch.setattr(env, "import_module", lambda name: fake)
    facts = report(capsys)
    facts.pop("driver", None)
    for name, value in {
        "accelerators": "2 x cuda",
        "cuda:0": "Card 0, capability (8, 0), 1.0 of 4.0 GiB free",
        "cuda:1": "cannot be asked: driver too old",
        "cuda runtime": "12.8",
        "cudnn": "91000",
        "nccl version": "2.27.5",
        "float32 products": "highest",
    }.items():
        assert facts[name] == value
    assert "hip runtime" not in facts


def test_variables_that_change_how_devices_are_used(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    facts = report(capsys)
    assert facts["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert facts["CUDA_LAUNCH_BLOCKING"] == "1"
