import pytest
import torch
from safetensors.torch import load_file

from pipework import save_checkpoint
from pipework.cli import main
from pipework.saving import convert
from tests.saving.harness import BALANCES, Cut, assert_same, make_pipe, model, snapshot


@pytest.mark.parametrize("stages", BALANCES)
def test_one_file_of_any_number_of_stages(tmp_path, capsys, stages):
    pipe = make_pipe(Cut(stages, "gpipe"))
    path = save_checkpoint(tmp_path, pipe, torch.optim.Adam(pipe.parameters()), step=12)
    out = tmp_path / "model.safetensors"
    assert main(["convert", str(path), str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: 13 tensors, {out.stat().st_size:,} bytes, of step 12\n"
    plain = model()
    plain.load_state_dict(load_file(out))
    assert_same(snapshot(plain), snapshot(pipe))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model.safetensors", "step-00000012"]


def test_mistakes(tmp_path, capsys):
    path = save_checkpoint(tmp_path / "run", make_pipe(), step=12)
    out = tmp_path / "x.safetensors"

    def said(*words):
        assert main(["convert", *map(str, words)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "is not the directory of a complete checkpoint: give one, such as" in said(path.parent, out)
    assert "is not the directory of a complete checkpoint: give one" in said(tmp_path / "nowhere", out)
    assert "wanted a name that ends in .safetensors" in said(path, tmp_path / "x.bin")
    assert "No such file or directory" in said(path, tmp_path / "no" / "x.safetensors")
    out.write_text("what was there")
    assert f"{out} is there already: choose another name, or say that it is to be" in said(path, out)
    file = path / "model-stage-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "model-stage-00001.safetensors: its content is not what was written" in said(path, out, "--force")
    assert out.read_text() == "what was there"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "x.safetensors"]


def test_a_file_that_is_there_is_replaced_on_request_alone(tmp_path):
    pipe = make_pipe()
    path = save_checkpoint(tmp_path / "run", pipe, step=12)
    out = tmp_path / "x.safetensors"
    out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match=r"is there already.*force=True in Python\. Nothing was changed"):
        convert(path, out)
    convert(path, out, force=True)
    assert_same({name: load_file(out)[name] for name in pipe.state_dict()}, snapshot(pipe))
    with pytest.raises(IsADirectoryError):
        convert(path, tmp_path / "run", force=True)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run", "x.safetensors"]
