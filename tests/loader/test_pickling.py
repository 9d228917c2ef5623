import io
import pickle
import subprocess
import sys
import textwrap
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from types import MemberDescriptorType

import cloudpickle
import numpy as np
import pytest

from energon.loader.transport.pickling import (
    BatchPickler,
    dump_pipeline,
    modules_named,
)
from energon.samples.provenance import known_source
from energon.samples.sample import Batch, Sample, edataclass
from tests.effort import some

ROOT = Path(__file__).parents[2]


def dumped(value):
    file = io.BytesIO()
    pickler = BatchPickler(file)
    pickler.dump(value)
    return file.getvalue(), list(pickler.buffers)


def crossed(value):
    data, buffers = dumped(value)
    return pickle.loads(memoryview(data), buffers=[bytearray(buffer.raw()) for buffer in buffers])


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value", [None, {"a": [1, 2.5, "é", b"x" * 200_000]}, Point(1, 2), int, len, {1, 2}, 1 + 2j]
)
def test_returns_what_was_pickled(value):
    assert crossed(value) == value


def test_big_arrays_go_out_of_band_and_small_ones_do_not():
    value = {"big": np.arange(10_000).reshape(100, 100), "small": np.arange(3)}
    assert len(dumped(value)[1]) == 1
    again = crossed(value)
    assert (again["big"] == value["big"]).all()
    assert (again["small"] == value["small"]).all()


@pytest.mark.parametrize("order", ["C", "F"])
def test_keeps_the_layout_of_arrays(order):
    array = np.asarray(np.arange(10_000.0).reshape(10, 1000), order=order)
    again = crossed(array)
    assert again.flags[f"{order}_CONTIGUOUS"]
    assert (again == array).all()


def local_class():
    @dataclass
    class Local:
        x: int

    return Local


def test_a_local_class_comes_back_as_itself():
    cls = local_class()
    in_worker = pickle.loads(dump_pipeline(cls))
    assert crossed(in_worker(3)) == cls(3)
    assert type(crossed([in_worker(3)])[0]) is cls


COPIES = """
import sys
from dataclasses import dataclass
import cloudpickle

@dataclass(slots=True)
class Slotted:
    x: int

@dataclass
class Below(Slotted):
    y: int = 0

sys.stdout.buffer.write(cloudpickle.dumps((Slotted, Below)))
"""


@pytest.fixture(scope="module")
def copies():
    """Classes of a main program as they are in its workers, where they have no slots."""
    program = subprocess.run([sys.executable, "-c", COPIES], check=True, capture_output=True)
    return pickle.loads(program.stdout)


def test_copies_of_classes_with_slots_arrive(copies):
    slotted, below = copies
    assert not isinstance(vars(slotted).get("x"), MemberDescriptorType)
    for kind in (slotted, below):
        batch = [kind(n) for n in range(3)]
        assert crossed(batch) == batch


@edataclass
class Cooked(Sample):
    text: str = "text"


def sources(count):
    return tuple(known_source("ds", f"s{n}", (0, 0, n), "0.tar", ("txt",)) for n in range(count))


@pytest.mark.parametrize(
    "batch",
    [
        Batch.from_samples([Cooked(__key__="a", __sources__=sources(9))]),
        Cooked(__key__="a", __sources__=sources(9)),
        Cooked(__key__="a", __sources__=[(each,) for each in sources(9)]),
        Cooked(__key__="a", __sources__=[sources(3), (), sources(2)]),
    ],
)
def test_sources_of_batches_are_pickled_by_property(batch):
    assert b"known_source\x94" not in dumped(batch)[0]
    again = crossed(batch)
    assert again == batch
    assert type(again.__sources__) is type(batch.__sources__)
    assert again.__sources__[0] == batch.__sources__[0]


@pytest.mark.parametrize("found", [None, (), [], sources(1), [None], ("text",) * 9, "text", {}])
def test_sources_of_another_form_arrive_as_they_were(found):
    batch = Cooked(__key__="a", __sources__=found)
    assert crossed(batch).__sources__ == found


def test_a_class_of_the_worker_comes_back_the_same_each_time():
    made_in_worker = type("Made", (), {"__module__": "nowhere"})
    first, second = crossed(made_in_worker()), crossed(made_in_worker())
    assert type(first) is type(second)


def test_functions_without_a_name_are_sent_by_value():
    assert crossed(lambda x: x + 1)(2) == 3


PROGRAM = """
import enum, sys
from dataclasses import dataclass
from itertools import islice
import numpy as np
from energon.errors import EnergonError
from energon.loader import get_savable_loader
from tests.loader.fake_pipeline import fake

print("started")

class Color(enum.Enum):
    RED = 1

@dataclass(slots=True)
class Batch:
    color: Color
    rows: list
    array: np.ndarray

class MyError(Exception):
    pass

def build():
    @dataclass(frozen=True)
    class Local:
        row: int
    offset = 10
    def make(lane, row):
        if row == 5:
            raise MyError("five")
        return Batch(Color.RED, [Local(row + offset)], np.full(5000, row)), Local
    return make, Local

make, Local = build()
loader = get_savable_loader(fake(make, workers=2), start_method=sys.argv[1])
try:
    for batch, cls in loader:
        assert cls is Local
        assert type(batch) is Batch and batch.color is Color.RED
        assert batch.rows == [Local(int(batch.array[0]) + 10)]
except MyError as error:
    assert loader.stats()["batches"] == 10
    print("arrived", error)
print(next(iter(get_savable_loader(fake(lambda lane, row: row, workers=1)))))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "method"),
    some(
        [("script", "forkserver"), ("-c", "forkserver"), ("script", "spawn"), ("script", "fork")], 2
    ),
)
def test_programs_without_a_main_guard(tmp_path, how, method):
    """The module of the program is not run again, and its classes are its own."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(PROGRAM))
    arguments = [str(script)] if how == "script" else ["-c", PROGRAM]
    done = subprocess.run(
        [sys.executable, *arguments, method],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["started", "arrived five", "0"], done.stderr


SPAWNED = """
import multiprocessing, sys
from dataclasses import dataclass
from energon.loader.savable import get_savable_loader
from tests.loader.fake_pipeline import fake

@dataclass
class Batch:
    row: int

class MyError(Exception):
    pass

class Rows:
    def make(self, lane, row):
        if row == 3:
            raise MyError("three")
        return Batch(row)

def train(method):
    try:
        for batch in get_savable_loader(fake(Rows().make, workers=1), start_method=method):
            assert type(batch) is Batch
            print(batch.row)
    except MyError as error:
        print("arrived", error, flush=True)

if __name__ == "__main__":
    rank = multiprocessing.get_context("spawn").Process(target=train, args=[sys.argv[1]])
    rank.start()
    rank.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_ranks_that_the_program_has_spawned_itself_have_workers(tmp_path, method):
    """There, the main program is called `__mp_main__`, and so do its classes say."""
    script = tmp_path / "train.py"
    script.write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, script, method],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["0", "1", "2", "arrived three"], done.stderr


def test_cloudpickle_still_tracks_classes():
    """The one thing that is taken from inside cloudpickle."""
    from cloudpickle import cloudpickle as inside

    cls = local_class()
    cloudpickle.dumps(cls)
    assert inside._DYNAMIC_CLASS_TRACKER_BY_ID[inside._DYNAMIC_CLASS_TRACKER_BY_CLASS[cls]] is cls


def test_names_the_modules_of_a_pipeline():
    torch = pytest.importorskip("torch")

    import json

    def uses_torch(row):
        return torch.tensor(row)

    assert "torch" in modules_named(dump_pipeline({"decoder": "torchrgb"}))
    assert "torch" in modules_named(dump_pipeline(uses_torch))
    assert modules_named(dump_pipeline({"a": Path("b")})) == ["pathlib"]
    assert "json" in modules_named(dump_pipeline(lambda row: json.dumps([row])))
