import subprocess
import sys

from pipework.cli import main


def test_another_suffix_is_refused_before_torch_is_imported(tmp_path):
    code = "import sys; sys.modules['torch'] = None\nfrom pipework.cli import main\nsys.exit(main(sys.argv[1:]))"
    words = ["convert", str(tmp_path), str(tmp_path / "model.pt")]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "model.pt: wanted a name that ends in .safetensors" in done.stderr


def test_a_folder_without_a_checkpoint_is_one_line(tmp_path, capsys):
    assert main(["convert", str(tmp_path), str(tmp_path / "model.safetensors")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
