"""Programs need no `if __name__ == "__main__":`, and functions of theirs run in processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from energon.errors import ConfigError
from energon.prepare.writers.tokens import TokenizeOptions, pack_tokens
from tests.datasets import write_shard

PROGRAM = """
import os

from energon.inspect.lint import lint_dataset
from energon.prepare.dataset import prepare_dataset
from energon.prepare.engines import Engine, run_batches
from energon.prepare import index

print("begin")
index.ALONE_SECONDS = 0
os.sched_getaffinity = lambda _: {{0, 1}}
STEP = 5


def add(number):
    return number + STEP, os.getpid()


two = Engine(num_workers=2)
info = prepare_dataset(
    {folder!r}, split_ratio={{"train": 1}}, sample_type="CrudeWebdataset", num_workers=2
)
print(sum(info.shard_counts.values()))
print(lint_dataset({folder!r}, engine=two).num_samples)
results = dict(run_batches(two, add, [(1,), (2,)]))
print([results[n][0] for n in (0, 1)], os.getpid() in {{pid for _, pid in results.values()}})
print(__name__, os.path.basename(__file__))
"""


@pytest.mark.slow
def test_a_program_that_starts_processes_is_run_once(tmp_path):
    for number in range(40):
        write_shard(tmp_path / f"many/{number:02}.tar", [(f"k{number}", {"txt": b"x"})])
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(tmp_path / "many")))
    done = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "begin",
        "40",
        "{'train': 40}",
        "[6, 7] False",
        "__main__ program.py",
    ]


def test_a_tokenizer_in_the_running_program_is_refused(tmp_path):
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match="put the function into a separate file"):
        pack_tokens(
            [str(tmp_path / "texts.jsonl")], tmp_path / "out", TokenizeOptions("__main__:encode")
        )
