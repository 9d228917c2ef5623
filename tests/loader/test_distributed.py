import subprocess
import sys
from pathlib import Path

import pytest

from energon.errors import ConfigError
from energon.loader.savable import SavableDataLoader, gather_states, scatter_states
from tests.loader.fake_pipeline import fake

ROOT = Path(__file__).parents[2]
PROGRAM = """
import logging
from dataclasses import replace
from itertools import islice
from pathlib import Path
import torch.distributed as dist
from energon.compat.megatron.loaders import SavableDataLoader as MegatronLoader
from energon.errors import StateError
from energon.loader import SavableDataLoader
from energon.worker import WorkerConfig
from tests.loader.fake_pipeline import FakePipeline

dist.init_process_group("gloo")
# Process 0 does something else: ranks within the group are not those of the job.
group = dist.new_group([1, 2])
def leave():
    # A process that leaves while others still use its connections makes them abort.
    dist.barrier()
    dist.destroy_process_group()

if dist.get_rank() == 0:
    leave()
    raise SystemExit
config = WorkerConfig.default_worker_config(dist.get_rank() - 1, data_parallel_group=group)

def loader(lanes=None):
    return SavableDataLoader(FakePipeline(replace(config, lanes=lanes)))

first = loader(lanes=4)
list(islice(first, 3))
state = first.save_state_global(2)
assert (state is None) == (dist.get_rank() != 2)
assert first.save_state_global(0) is None  # that process is in another group
expected = list(islice(first, 5))

second = loader()
second.restore_state_global(state, src_rank=1)
assert list(islice(second, 5)) == expected

both = [state]
dist.broadcast_object_list(both, src=2, group=group)
third = loader()
third.restore_state_global(both[0])
assert list(islice(third, 5)) == expected

try:
    loader().restore_state_global({"format": "?"} if config.rank == 0 else None, src_rank=0)
except StateError as error:
    assert "energon loader state" in str(error)
else:
    raise AssertionError("accepted a state of another format")

messages = []
handler = logging.Handler()
handler.emit = lambda record: messages.append(record.getMessage())
logging.getLogger("energon").addHandler(handler)
for kind in (SavableDataLoader, MegatronLoader):
    ahead = kind(FakePipeline(config))
    list(islice(ahead, 3 + 2 * config.rank))
    ahead.save_state_global(2)
told = [text for text in messages if "saved at different steps" in text]
assert len(told) == (2 if dist.get_rank() == 2 else 0), messages
Path(__file__).with_name(f"done.{config.rank}").touch()
leave()
"""


@pytest.mark.slow
def test_states_cross_real_process_groups(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    done = subprocess.run(
        [sys.executable, *launch],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "done.0").exists()
    assert (tmp_path / "done.1").exists()


def test_one_rank_needs_no_process_group():
    config = fake().worker_config
    assert gather_states({"a": 1}, config, dst_rank=0) == [{"a": 1}]
    assert scatter_states(lambda: [{"a": 1}], config, src_rank=0) == {"a": 1}


def test_says_what_is_missing_for_a_global_state():
    loader = SavableDataLoader(fake(rank=1, world_size=2))
    with pytest.raises(ConfigError, match="init_process_group"):
        loader.save_state_global()


def test_src_rank_counts_within_the_group():
    with pytest.raises(ConfigError, match="from 0 to 1; got 2"):
        scatter_states(lambda: [], fake(world_size=2).worker_config, src_rank=2)
