"""What the small programs share: the shards that they read, and how they name what they find.

Each `check_…` of this folder takes a package with the interface of webdataset and a folder of
shards and returns what it found. Nothing in it depends on random order: what is shuffled is
sorted. Samples have the fields txt, cls and json; there are 4 shards of 5.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import tarfile
from importlib import import_module
from pathlib import Path

import numpy as np


def setup(folder):
    """Write the shards that all checks read."""
    for shard in range(4):
        members = []
        for n in range(5 * shard, 5 * shard + 5):
            members += [
                (f"{n:04}.txt", f"text {n}".encode()),
                (f"{n:04}.cls", str(n % 3).encode()),
                (f"{n:04}.json", json.dumps({"n": n}).encode()),
            ]
        write_tar(Path(folder) / f"shard-{shard:06}.tar", members)
    image = io.BytesIO()
    from PIL import Image

    Image.fromarray(np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10).save(image, "PNG")
    array = io.BytesIO()
    np.save(array, np.arange(6).reshape(2, 3))
    members = [
        ("d/a.png", image.getvalue()),
        ("d/a.left.png", image.getvalue()),
        ("d/a.npy", array.getvalue()),
        ("d/a.txt.gz", gzip.compress(b"packed")),
        ("d/a.PYD", pickle.dumps([1])),
        ("d/a.xyz", b"?"),
        ("__skipped__/b.txt", b"meta"),
        ("d/b", b"no extension"),
    ]
    write_tar(Path(folder) / "media.tar", members)


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def shards(folder):
    return str(Path(folder) / "shard-{000000..000003}.tar")


def first(folder):
    return str(Path(folder) / "shard-000000.tar")


def module(wds, name):
    return import_module(f"{wds.__name__}.{name}")


def keys(samples):
    return [sample["__key__"] for sample in samples]


def raised(function, *args, **kw):
    """Which of the usual exceptions a call raises: the first that programs may wait for."""
    kinds = (tarfile.ReadError, KeyError, TypeError, AttributeError, OSError, ValueError)
    try:
        function(*args, **kw)
    except Exception as error:
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), "Exception")
    return None


def plain(wds, folder, **kw):
    return wds.WebDataset(shards(folder), shardshuffle=False, **kw)
