"""What is refused, what allows it, and the lock that nothing overrules."""

from __future__ import annotations

import io
import pickle

import pytest

import energon.webdataset as wds
from energon.errors import SecurityError
from energon.webdataset import autodecode
from tests.commands import run_python
from tests.effort import some
from tests.webdataset.shards import make_shards, tar_bytes

PROGRAM = """
import sys
import energon.webdataset as wds
from energon.errors import SecurityError

def kinds(sample):
    return type(sample["pyd"]).__name__

wds.utils.enforce_security = {switch}
dataset = wds.WebDataset(sys.argv[1]).decode(allow={allow}).map(kinds)
with wds.WebLoader(dataset, batch_size=None, num_workers={workers}) as loader:
    try:
        print(list(loader))
    except Exception as error:
        print(isinstance(error, SecurityError), "enforce_security" in str(error))
"""


@pytest.fixture
def pickled(tmp_path):
    path = tmp_path / "pickled.tar"
    path.write_bytes(tar_bytes([("a.pyd", pickle.dumps([1, 2]))]))
    return str(path)


def decoded(path, **options):
    return next(iter(wds.WebDataset(path).decode(**options)))["pyd"]


def test_what_is_refused_says_which_switch_allows_it(pickled):
    with pytest.raises(SecurityError, match=r'allow=\("pickle",\).*ENERGON_ALLOW=pickle') as caught:
        decoded(pickled)
    assert isinstance(caught.value, ValueError)
    assert decoded(pickled, allow=("pickle",)) == [1, 2]


@pytest.mark.parametrize("lock", ["program", "environment"])
def test_nothing_overrules_the_lock(pickled, tmp_path, monkeypatch, lock):
    allowing = wds.WebDataset(pickled).decode(allow=("pickle",))
    monkeypatch.setenv("ENERGON_ALLOW", "pickle,shell")
    if lock == "program":
        monkeypatch.setattr(wds.utils, "enforce_security", True)
    else:
        monkeypatch.setenv("WDS_SECURE", "1")
    for attempt in (
        lambda: decoded(pickled),
        lambda: decoded(pickled, allow=("pickle",)),
        # Made before the lock was there.
        lambda: next(iter(allowing)),
        lambda: list(wds.WebDataset("pipe:true", allow=("shell",))),
        lambda: autodecode.torch_loads(b"", allow=("pickle",)),
        lambda: list(wds.LMDBCached(tmp_path / "x", allow=("pickle",))([object()])),
        lambda: wds.filters.decode_pickle(None),
    ):
        with pytest.raises(SecurityError, match="enforce_security is True, or WDS_SECURE=1"):
            attempt()
    (shard,) = make_shards(tmp_path, [2])
    with pytest.raises(ValueError, match="cannot open local files"):
        wds.gopen(shard)
    # Data are not danger.
    assert len(list(wds.WebDataset(shard).decode())) == 2


def test_streams_of_several_pickles_are_read_one_by_one(monkeypatch):
    monkeypatch.setenv("ENERGON_ALLOW", "pickle")
    stream = io.BytesIO(pickle.dumps([1]) + pickle.dumps({2}))
    assert [wds.filters.decode_pickle(stream) for _ in range(2)] == [[1], {2}]


def test_what_was_made_under_the_lock_stays_locked(pickled, monkeypatch):
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    dataset = wds.WebDataset(pickled).decode(allow=("pickle",))
    monkeypatch.setattr(wds.utils, "enforce_security", None)
    with pytest.raises(SecurityError, match="Unpickling is not allowed"):
        next(iter(dataset))


def test_the_program_comes_before_the_environment(pickled, monkeypatch):
    monkeypatch.setenv("WDS_SECURE", "1")
    monkeypatch.setattr(wds.utils, "enforce_security", False)
    assert decoded(pickled) == [1, 2]
    monkeypatch.setenv("WDS_SECURE", "0")
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(SecurityError):
        decoded(pickled)


def test_no_handler_tolerates_what_the_lock_refuses(pickled, monkeypatch):
    monkeypatch.setattr(wds.utils, "enforce_security", True)
    with pytest.raises(SecurityError):
        list(wds.WebDataset(pickled).decode(handler=wds.ignore_and_continue))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "allow", "printed"),
    some(
        [
            ("True", ("pickle",), "True True"),
            ("None", (), "True False"),
            ("None", ("pickle",), "['list']"),
            ("False", (), "['list']"),
        ],
        4,
    ),
)
def test_worker_processes_know_the_switch(pickled, switch, allow, printed):
    program = PROGRAM.format(switch=switch, allow=allow, workers=1)
    done = run_python(program, pickled)
    assert done.stdout.strip() == printed, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_registries_of_a_program_are_known_in_worker_processes(tmp_path, start):
    urls = make_shards(tmp_path, [2])
    program = (
        "import sys\n"
        "import energon.webdataset as wds\n"
        "if __name__ == '__main__':\n"
        "    wds.autodecode.decoders.update(txt=lambda data: data.decode().upper())\n"
        "    dataset = wds.WebDataset(sys.argv[1]).decode().map(lambda sample: sample['txt'])\n"
        "    with wds.WebLoader(dataset, batch_size=None, num_workers=1) as loader:\n"
        "        print(list(loader))\n"
    )
    done = run_python(program, urls[0], ENERGON_START_METHOD=start)
    assert done.stdout.strip() == "['TEXT 0', 'TEXT 1']", done.stderr


def test_decoding_imports_no_fluid_interface():
    """There was a cycle: autodecode, compat, filters."""
    program = (
        "import sys, energon.webdataset.autodecode\n"
        "loaded = {'compat', 'filters'} & {name.rpartition('.')[2] for name in sys.modules"
        " if name.startswith('energon.webdataset.')}\n"
        "print(sorted(loaded))\n"
    )
    done = run_python(program)
    assert done.stdout.strip() == "[]", done.stderr
