import pytest

from energon.loader.replaceable_worker import MAX_SKIPPED, AfterDeath, DeathRecord

RETRY, SKIP, GIVE_UP = AfterDeath.RETRY, AfterDeath.SKIP, AfterDeath.GIVE_UP


DELIVERED = "a batch was delivered"


@pytest.mark.parametrize(
    ("chances", "events", "expected"),
    [
        (3, 3 * [(0, 5)], [RETRY, RETRY, SKIP]),
        (2, [(0, 5), DELIVERED, (0, 5)], [RETRY, SKIP]),
        (3, 3 * [None], [RETRY, RETRY, GIVE_UP]),
        (2, 5 * [None, DELIVERED], 5 * [RETRY]),
        (2, [(0, row) for row in range(8)], [*7 * [RETRY], GIVE_UP]),
        (2, [(0, row) for row in range(MAX_SKIPPED) for _ in "ab"], MAX_SKIPPED * [RETRY, SKIP]),
        (1, [(0, row) for row in range(MAX_SKIPPED + 1)], [*MAX_SKIPPED * [SKIP], GIVE_UP]),
    ],
    ids=[
        "a row is left out after its last chance",
        "whatever was delivered in between",
        "no row is to blame",
        "a batch is a new start without a row",
        "ever other rows",
        "several rows of a batch",
        "too many rows of a batch",
    ],
)
def test_deaths_end_in_a_skipped_row_or_the_end_of_the_run(chances, events, expected):
    record, verdicts = DeathRecord(chances, 60), []
    for event in events:
        if event == DELIVERED:
            record.delivered()
        else:
            verdicts.append(record.died(event))
    assert verdicts == expected


def test_kills_end_the_run_when_patience_does():
    now = [0.0]
    record = DeathRecord(3, 60, clock=lambda: now[0])
    pauses = []
    while record.died(None, killed=True) is RETRY:
        pauses.append(record.pause_seconds)
        now[0] += 1 + record.pause_seconds
    assert 60 <= now[0] < 72
    assert pauses[:5] == [0, 0.1, 0.2, 0.4, 0.8]
    assert max(pauses) == 10


def test_patience_begins_anew_with_every_batch():
    now = [0.0]
    record = DeathRecord(3, 60, clock=lambda: now[0])
    for _ in range(10):
        assert record.died(None, killed=True) is RETRY
        now[0] += 50
        record.delivered()
        assert record.pause_seconds == 0


def test_crashes_are_counted_among_kills():
    record = DeathRecord(2, 60)
    verdicts = [record.died(None, killed=number != 5) for number in range(10)]
    assert verdicts == [RETRY] * 10
    assert record.died(None) is GIVE_UP
