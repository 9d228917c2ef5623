"""Record the samples that fail, so that later runs can exclude them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from energon.errors import ConfigError
from energon.io.address import local_path, shown_address
from energon.messages import describe_error
from energon.stages.hooks.failures import log_exception
from energon.stages.hooks.hook import ErrorHandler


class Quarantine:
    """An error handler that records failing samples in a folder, one file per dataset.

    Give it to `WorkerConfig(global_error_handler=...)` or `@stateless(error_handler=...)`. Files
    are named after the folder of the dataset, with ".jsonl"; each line has the address of the
    dataset, the shard and key of a sample, and the reason. `energon prepare --exclude-from FILE`
    and `exclude_from=FOLDER` of the dataset getters exclude these samples of this dataset.

    All workers and ranks may write into one folder. A batch or pack that fails is not recorded,
    since it is unknown which of its samples was the cause.

    Args:
        folder: The folder of the files; created if it does not exist.
        handler: Also called for each failure.

    Raises:
        ConfigError: If the folder is not on this machine, or cannot be made.

    Example:
        >>> import json
        >>> from pathlib import Path
        >>> from energon import DefaultTaskEncoder, WorkerConfig, get_val_dataset
        >>> class Strict(DefaultTaskEncoder):
        ...     def encode_sample(self, sample):
        ...         if "8" in sample.caption:
        ...             raise ValueError("an eight")
        ...         return sample.caption
        >>> config = WorkerConfig(
        ...     rank=0,
        ...     world_size=1,
        ...     num_workers=0,
        ...     global_error_handler=Quarantine("failed", handler=lambda *_: None),
        ... )
        >>> dataset = get_val_dataset(
        ...     "photos", worker_config=config, batch_size=1, task_encoder=Strict()
        ... )
        >>> list(dataset)
        [['grey number 9']]
        >>> entry = json.loads(Path("failed/photos.jsonl").read_text())
        >>> entry["shard"], entry["key"], entry["reason"]
        ('shard-0.tar', '8', 'ValueError: an eight')
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, handler: ErrorHandler = log_exception
    ) -> None:
        self.folder = Path(local_path(folder))
        self.handler = handler
        self._noted: set[tuple[str, str | None, str]] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{folder}: cannot write quarantine files here: {error}") from error

    def __call__(self, error: Exception, sample: Any, sources: Any = None) -> None:
        """Record the source of a failing sample if it has only one, and call the other handler."""
        if sources and len(sources) == 1 and hasattr(sources[0], "key"):
            self._note(sources[0], error)
        self.handler(error, sample, sources)

    def _note(self, source: Any, error: Exception) -> None:
        entry = (str(source.dataset_path), source.shard_name, source.key)
        if entry in self._noted:
            return
        self._noted.add(entry)
        line = quarantine_line(*entry, describe_error(error))
        path = quarantine_file(self.folder, source.dataset_path)
        # One write at the end of the file: lines of other processes stay whole.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)


def quarantine_line(
    dataset_path: str, shard: str | None, key: str | None, reason: str | None = None
) -> str:
    """Return the line of a quarantine file that excludes a sample, or a shard if `key` is None."""
    dataset = shown_address(dataset_path) if dataset_path else None
    entry = {"dataset": dataset, "shard": shard, "key": key, "reason": reason}
    return json.dumps({name: value for name, value in entry.items() if value is not None})


def quarantine_name(dataset_path: Any) -> str:
    """Return the name of the file for a dataset: that of its folder."""
    return f"{os.path.basename(os.path.normpath(str(dataset_path)))}.jsonl"


def quarantine_file(folder: str | os.PathLike[str], dataset_path: Any) -> Path:
    """Return the path of the file for a dataset in a folder."""
    return Path(folder) / quarantine_name(dataset_path)
