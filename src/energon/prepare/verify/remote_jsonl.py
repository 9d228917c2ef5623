"""Check and repair a JSONL file in a store."""

from __future__ import annotations

from energon.io.address import redact
from energon.io.files import write_bytes
from energon.prepare.jsonl import JsonlCopy, prepare_jsonl
from energon.prepare.verify.shard import Depth
from energon.prepare.verify.verify import Report, check_jsonl


def verify_remote_jsonl(address: str, depth: Depth) -> Report:
    """Check a JSONL file, see `energon.prepare.verify.verify.verify_dataset`.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If the store cannot be read.
    """
    with JsonlCopy.opened(address, content=depth != "quick") as copy:
        copy.fetch_index()
        return _report(copy, depth)


def repair_remote_jsonl(address: str, depth: Depth) -> tuple[Report, Report]:
    """Check a JSONL file, and index it anew if that helps; return what is wrong before and after.

    Raises:
        DatasetNotFoundError: If there is no such file.
        StorageError: If the store cannot be read or written.
    """
    with JsonlCopy.opened(address) as copy:
        copy.fetch_index()
        before = _report(copy, depth)
        lost = any(problem.kind == "shard-damaged" for problem in before.problems)
        if lost or not any(problem.repairable for problem in before.problems):
            return before, before
        prepare_jsonl(copy.path)
        write_bytes(copy.beside(copy.index), copy.index)
        return before, _report(copy, depth)


def _report(copy: JsonlCopy, depth: Depth) -> Report:
    report = check_jsonl(copy.path, depth)
    report.rename(redact(copy.address), copy.said)
    return report
