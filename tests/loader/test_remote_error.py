import copyreg
import pickle

import pytest

from energon.errors import NoSuchFileError, SampleError, WorkerError
from energon.loader.transport.reports import RemoteError


class TwoArguments(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return RemoteError.of(caught)


def test_type_text_and_notes_come_back():
    error = SampleError("bad sample")
    error.add_note("in shard 3")
    again = raised(error).rebuild()
    assert type(again) is SampleError
    assert str(again) == "bad sample"
    assert again.__notes__ == ["in shard 3"]


def test_the_cause_shows_where_it_was_raised():
    assert "in raised" in str(raised(ValueError("x")).rebuild().__cause__)


@pytest.mark.parametrize("error", [TwoArguments(1, 2), ValueError(lambda: 0, open)])
def test_what_cannot_be_rebuilt_is_told(error):
    again = raised(error).rebuild()
    assert isinstance(again, (WorkerError, ValueError))
    assert type(error).__name__ in str(again.__cause__)


def test_an_exception_that_its_constructor_refuses_becomes_a_worker_error():
    again = raised(TwoArguments(1, 2)).rebuild()
    assert isinstance(again, WorkerError)
    assert "TwoArguments: 1 and 2" in str(again)


def test_packages_that_pickle_exceptions_their_own_way_change_nothing(monkeypatch):
    error = NoSuchFileError("'x' is not there")
    monkeypatch.setitem(
        copyreg.dispatch_table,
        NoSuchFileError,
        lambda error: (ValueError.__new__, (NoSuchFileError,)),
    )
    with pytest.raises(TypeError, match="not safe"):
        pickle.loads(pickle.dumps(error))
    again = raised(error).rebuild()
    assert type(again) is NoSuchFileError
    assert str(again) == str(error)
