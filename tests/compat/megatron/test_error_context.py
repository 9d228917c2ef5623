from __future__ import annotations

import pytest

from energon.compat.megatron.helpers import ErrorContext, handle_restore_errors
from energon.errors import FatalSampleError, SkipSample
from energon.samples.provenance import SourceInfo

SOURCE = SourceInfo(dataset_path="/data", index=3, shard_name="0.tar", file_names=("a.txt",))
SAMPLE = {"__key__": "a", "__sources__": (SOURCE,)}


def fail(context, error=None):
    with context.handle_errors(SAMPLE):
        raise error or ValueError("bad")


def test_failures_go_to_the_handler_with_their_sources():
    seen = []
    context = ErrorContext("parse", lambda *failure: seen.append(failure))
    fail(context)
    ((error, sample, sources),) = seen
    assert (str(error), sample, sources) == ("bad", SAMPLE, (SOURCE,))


def test_too_many_failures_in_a_row_end_the_run():
    context = ErrorContext("parse", lambda *failure: None, tolerance=2)
    for _ in range(3):
        fail(context)
        with context.handle_errors(SAMPLE):
            pass
    fail(context)
    with pytest.raises(FatalSampleError, match=r"parse failed on .*/data.*bad; that makes 2"):
        fail(context)
    context.reset()
    fail(context)


def test_nothing_is_too_much_for_a_tolerance_of_nothing():
    context = ErrorContext("parse", lambda *failure: None, tolerance=0)
    for _ in range(300):
        fail(context)


def test_a_skip_is_no_failure():
    context = ErrorContext("parse", lambda *failure: pytest.fail("not a failure"), tolerance=1)
    for _ in range(3):
        fail(context, SkipSample())


@pytest.mark.parametrize("kind", [RecursionError, ImportError, NameError])
def test_faults_of_the_program_end_the_run(kind):
    context = ErrorContext("parse", lambda *failure: None, tolerance=0)
    with pytest.raises(FatalSampleError, match=kind.__name__) as caught:
        fail(context, kind("x"))
    assert isinstance(caught.value.__cause__, kind)


def test_failures_while_restoring_go_to_the_handler_unless_they_end_every_run():
    seen = []

    def note(*failure):
        seen.append(failure)

    with handle_restore_errors(note, SAMPLE):
        raise ValueError("bad")
    assert len(seen) == 1
    fatal = pytest.raises(FatalSampleError, match=r"/data.*NameError")
    with fatal, handle_restore_errors(note, SAMPLE):
        raise NameError
