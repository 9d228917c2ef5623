"""From a folder of photos and a CSV to batches with workers, in three commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.datasets import jpeg

TRAIN = """
from energon import WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon import get_loader

if __name__ == "__main__":
    config = WorkerConfig.default_worker_config(num_workers=2)
    dataset = get_train_dataset("dataset", worker_config=config, batch_size=4)
    with get_savable_loader(dataset) as loader:
        seen = set()
        for batch, _ in zip(loader, range(60), strict=False):
            assert tuple(batch.image.shape) == (4, 3, 8, 12)
            seen.update(batch.caption)
    held = get_val_dataset("dataset", worker_config=config, batch_size=None)
    with get_loader(held) as loader:
        others = {sample.caption for sample in loader}
    assert not seen & others
    print(len(seen) + len(others))
"""


@pytest.mark.slow  # the page "Getting started", which always runs, does the same without .JPG
def test_photos_and_a_table_are_trained_on_after_three_commands(tmp_path):
    photos = tmp_path / "photos"
    photos.mkdir()
    rows = ["file,caption"]
    for n in range(40):
        name = f"{n:03}.{'JPG' if n % 5 == 0 else 'jpg'}"
        (photos / name).write_bytes(jpeg(n))
        rows.append(f'{name},"photo {n}, taken today"')
    (photos / "captions.csv").write_text("\n".join(rows))
    (tmp_path / "train.py").write_text(TRAIN)
    folder = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}

    def command(*words):
        done = subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    field_map = '{"image": "jpg", "caption": "json[caption]"}'
    command(
        *("energon", "pack", "photos", "dataset", "--split-ratio", "4,1"),
        *("--sample-type", "CaptioningSample", "--field-map", field_map),
    )
    assert command("energon", "lint", "dataset") == "40 samples: no problems\n"
    assert command("python", "train.py") == "40\n"
