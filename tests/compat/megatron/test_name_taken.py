"""Programs with a folder or file called `energon` of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("path", ["energon/__init__.py", "energon.py"])
def test_a_module_of_the_program_in_place_of_energon_is_named(tmp_path, path):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("mine = True")
    (tmp_path / "program.py").write_text("import megatron.energon")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True)
    said = done.stderr.decode()
    assert said.splitlines()[-1].startswith("ImportError: megatron.energon needs the package")
    assert str(tmp_path / path) in said


def test_a_folder_of_data_called_energon_is_not_in_the_way(tmp_path):
    (tmp_path / "energon").mkdir()
    (tmp_path / "program.py").write_text("import megatron.energon, energon; energon.get_loader")
    subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=True)
