"""What the small programs for `megatron.energon` share: datasets, encoders, and how they are run.

Each `check_…` of this folder takes the package and a folder of datasets and returns what it found.
What is in random order is sorted. `texts` and `more` are crude (5 shards of 6 samples, the last
one is val), `captions` has typed samples.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tarfile
from importlib import import_module
from itertools import islice
from pathlib import Path

PARTS = [("train", "shard-[0-3].tar"), ("val", "shard-4.tar")]


def setup(folder):
    """Write the datasets that all checks read."""
    energon = import_module("megatron.energon")
    for name in ("texts", "more", "captions"):
        write_shards(Path(folder) / name, name)
        prepare(energon, Path(folder) / name)
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    for name in ("texts", "more"):
        describe(Path(folder) / name, {**crude, "subflavors": {"of": name}})
    kind = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    fields = {"image": "json", "caption": "txt"}
    describe(Path(folder) / "captions", {"sample_type": kind, "field_map": fields})
    lines = [json.dumps({"id": n, "text": f"line {n}"}) + "\n" for n in range(8)]
    (Path(folder) / "lines.jsonl").write_text("".join(lines))
    media = Path(folder) / "media"
    media.mkdir()
    for n in range(5 * 6):
        (media / f"{n:03}.txt").write_text(f"medium {n}")
    # Modules of programs, which documents name.
    sys.path.insert(0, str(Path(__file__).resolve().parent))


def write_shards(path, name, shards=5, samples=6):
    path.mkdir()
    for shard in range(shards):
        with tarfile.open(path / f"shard-{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for n in range(shard * samples, (shard + 1) * samples):
                for part, content in (("txt", f"{name} {n}"), ("json", json.dumps({"n": n}))):
                    info = tarfile.TarInfo(f"{n:03}.{part}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content.encode()))


def prepare(energon, path, paths=None, **settings):
    settings.setdefault("split_parts_patterns", PARTS)
    names = paths or [file.name for file in sorted(path.glob("*.tar"))]
    found = energon.BaseWebdatasetFactory.prepare_dataset(path, names, workers=1, **settings)
    return sorted(found)


def describe(path, content):
    # JSON is YAML.
    (path / ".nv-meta" / "dataset.yaml").write_text(json.dumps(content))


def copy(folder, name, to):
    shutil.copytree(Path(folder) / name, Path(folder) / to)
    return Path(folder) / to


def document(folder, name, **content):
    """Write a metadataset and return its path."""
    path = Path(folder) / f"{name}.yaml"
    path.write_text(json.dumps({"__module__": "megatron.energon", **content}))
    return path


def config(energon, num_workers=0, **settings):
    return energon.WorkerConfig(rank=0, world_size=1, num_workers=num_workers, **settings)


def cooked(energon, sample):
    return energon.TextSample(**energon.basic_sample_keys(sample), text=sample["txt"])


def encoder(energon, **hooks):
    """Return a task encoder that makes text samples of crude ones, with more hooks."""

    @energon.stateless
    def cook(sample):
        return cooked(energon, sample)

    settings = {"cookers": [energon.Cooker(cook)], **hooks}
    kind = type("Encoder", (energon.DefaultTaskEncoder,), settings)
    return kind(raw_batch_type=None)


def train(energon, path, *, workers=0, epoch=True, **settings):
    """Return the training dataset of a program; `epoch` for each sample once."""
    settings.setdefault("task_encoder", encoder(energon))
    settings.setdefault("batch_size", 4)
    return energon.get_train_dataset(
        path,
        worker_config=settings.pop("worker_config", None) or config(energon, workers),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        **({"repeat": False, **settings} if epoch else settings),
    )


def val(energon, path, *, workers=0, **settings):
    settings.setdefault("task_encoder", encoder(energon))
    settings.setdefault("batch_size", 4)
    return energon.get_val_dataset(path, worker_config=config(energon, workers), **settings)


def loader(energon, dataset, **settings):
    settings.setdefault("watchdog_timeout_seconds", None)
    return energon.get_savable_loader(dataset, **settings)


def texts(batches, count=None):
    """Return the texts of batches."""
    return [list(batch.text) for batch in islice(batches, count)]


def flat(lists):
    return [each for inner in lists for each in inner]


def raised(function, *args, **kw):
    """Which of the usual exceptions a call raises: the first that programs may wait for."""
    kinds = (AssertionError, KeyError, TypeError, AttributeError, OSError, ValueError)
    try:
        function(*args, **kw)
    except Exception as error:
        return next((kind.__name__ for kind in kinds if isinstance(error, kind)), "Exception")
    return None


def command(*arguments, answers=None):
    """Run the command line; return exit code and what it printed to stdout."""
    main = import_module("megatron.energon.cli.main").main
    runner = import_module("click.testing").CliRunner()
    with contextlib.redirect_stderr(io.StringIO()):
        done = runner.invoke(main, [str(each) for each in arguments], input=answers)
    return done.exit_code, getattr(done, "stdout", done.output)
