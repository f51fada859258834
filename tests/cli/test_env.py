import sys
from types import ModuleType, SimpleNamespace

import torch

import pipework
from pipework.cli import env, main


def report(capsys):
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


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


def test_without_torch(capsys, monkeypatch):
    def missing(name):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return ModuleType(name)

    monkeypatch.setattr(env, "import_module", missing)
    facts = report(capsys)
    assert facts["torch"] == "not installed"
    assert "gloo" not in facts


def test_a_broken_torch_says_so(capsys, monkeypatch):
    def broken(name):
        raise ImportError("libtorch.so: cannot open shared object file", name="torch._C")

    monkeypatch.setattr(env, "import_module", broken)
    monkeypatch.setattr(env, "version", lambda: "1")
    assert report(capsys)["torch"] == "cannot be imported: libtorch.so: cannot open shared object file"


def test_accelerators_are_counted_and_named():
    two = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_accelerator=lambda: SimpleNamespace(type="cuda")
    )
    named = SimpleNamespace(accelerator=two, cuda=SimpleNamespace(get_device_name=lambda index: f"Card {index // 2}"))
    assert env._accelerators(named) == "2 x cuda (Card 0)"
    assert env._accelerators(SimpleNamespace(accelerator=two)) == "2 x cuda"
    assert env._accelerators(SimpleNamespace()) == "none"
    assert env._accelerators(SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: False))) == "none"


def test_a_report_of_accelerators_has_what_lies_below_pytorch(monkeypatch):
    def no_driver(index):
        raise RuntimeError("driver too old\nand more")

    module = SimpleNamespace(
        get_device_name=lambda index: f"Card {index}",
        get_device_capability=no_driver,
        mem_get_info=lambda index: (2**30, 2**32),
        nccl=SimpleNamespace(version=lambda: (2, 27, 5)),
        can_device_access_peer=lambda a, b: a < b,
    )
    accelerator = SimpleNamespace(
        is_available=lambda: True, device_count=lambda: 2, current_accelerator=lambda: SimpleNamespace(type="cuda")
    )
    fake = SimpleNamespace(
        accelerator=accelerator,
        cuda=module,
        version=SimpleNamespace(cuda="12.8", hip=None),
        backends=SimpleNamespace(cudnn=SimpleNamespace(version=lambda: 91000)),
        get_float32_matmul_precision=lambda: "highest",
    )
    monkeypatch.setattr(env, "_driver", lambda: "")
    assert env._details_of_accelerators(fake) == {
        "cuda:0": "Card 0, capability cannot be asked: driver too old, 1.0 of 4.0 GiB free",
        "cuda:1": "Card 1, capability cannot be asked: driver too old, 1.0 of 4.0 GiB free",
        "runtime": "cuda 12.8",
        "cudnn": "91000",
        "nccl version": "2.27.5",
        "peer access": "0-1",
        "float32 products": "highest",
    }
    del module.nccl
    assert "nccl version" not in env._details_of_accelerators(fake)


def test_variables_that_change_how_devices_are_used(capsys, monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    facts = report(capsys)
    assert facts["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert facts["CUDA_LAUNCH_BLOCKING"] == "1"
