"""Read a dataset of which one file is hostile, in every way that the product reads it."""

from __future__ import annotations

import base64
import shutil
import tempfile
from pathlib import Path

import energon.webdataset as wds
from energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_val_dataset
from energon.errors import EnergonError
from energon.formats.tar.scan import scan_tar
from energon.inspect.info import describe
from energon.prepare.verify.dataset import verify_dataset
from energon.sources.files.samples import WebdatasetFileStore


class Raw(DefaultTaskEncoder):
    decoder = None

    def batch(self, samples):
        return samples


def read(pristine, case):
    """Return what each way of reading came to, as text; "kept" where it gave the right content.

    Args:
        pristine: Folder of a prepared dataset.
        case: Which `file` of it has which `data` instead, in base64.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "ds")
        shutil.copytree(pristine, folder)
        (folder / case["file"]).write_bytes(base64.b64decode(case["data"]))
        wanted = trained(pristine)
        outcomes = []
        for way in (scanned, trained, streamed, checked, described, looked_up):
            try:
                found = way(folder)
            except EnergonError as error:
                found = f"refused by {type(error).__name__}"
            if way is trained and isinstance(found, dict):
                # Contents of the shards were left alone, so an index that is taken is right.
                is_shard = case["file"].endswith(".tar")
                assert is_shard or found == wanted, f"{case['file']}: other contents, no error"
                found = "kept"
            outcomes.append(f"{way.__name__}: {found}")
        return "; ".join(outcomes)


def scanned(folder):
    for shard in sorted(folder.rglob("*.tar")):
        scan_tar(shard, strict=False)
    return "scanned"


def trained(folder):
    config = WorkerConfig(rank=0, world_size=1, num_workers=0, lanes=1)
    dataset = get_val_dataset(
        folder, split_part="train", worker_config=config, batch_size=16, task_encoder=Raw()
    )
    with get_savable_loader(dataset) as loader:
        return {
            sample["__key__"]: {k: v for k, v in sample.items() if not k.startswith("__")}
            for batch in loader
            for sample in batch
        }


def streamed(folder):
    shards = [str(shard) for shard in sorted(folder.rglob("*.tar"))]
    return f"{len(list(wds.WebDataset(shards, shardshuffle=False)))} samples"


def checked(folder):
    return f"{len(verify_dataset(folder).problems)} problems"


def described(folder):
    return f"{describe(folder)['samples']} samples"


def looked_up(folder):
    store = WebdatasetFileStore(folder)
    return f"{len(store['k0001.txt'][0])} bytes"
