from energon.loader.replaceable_worker import MAX_SKIPPED, DeathRecord, Verdict

RETRY, SKIP, GIVE_UP = Verdict.RETRY, Verdict.SKIP, Verdict.GIVE_UP


def test_a_row_is_left_out_after_its_last_chance():
    record = DeathRecord(3, 60)
    assert [record.died((0, 5)) for _ in range(3)] == [RETRY, RETRY, SKIP]


def test_deaths_at_a_row_count_however_many_batches_came_in_between():
    record = DeathRecord(2, 60)
    assert record.died((0, 5)) is RETRY
    record.delivered()
    assert record.died((0, 5)) is SKIP


def test_deaths_without_a_row_end_the_run():
    record = DeathRecord(3, 60)
    assert [record.died(None) for _ in range(3)] == [RETRY, RETRY, GIVE_UP]


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


def test_batches_in_between_are_a_new_start():
    record = DeathRecord(2, 60)
    for _ in range(5):
        assert record.died(None) is RETRY
        record.delivered()


def test_deaths_at_ever_other_rows_end_the_run():
    record = DeathRecord(2, 60)
    verdicts = [record.died((0, row)) for row in range(8)]
    assert verdicts == [RETRY] * 7 + [GIVE_UP]


def test_several_bad_rows_in_one_batch_do_not():
    record = DeathRecord(2, 60)
    deaths = [record.died((0, row)) for row in range(MAX_SKIPPED) for _ in range(2)]
    assert deaths == [RETRY, SKIP] * MAX_SKIPPED


def test_too_many_bad_rows_in_one_batch_have_another_cause():
    record = DeathRecord(1, 60)
    verdicts = [record.died((0, row)) for row in range(MAX_SKIPPED + 1)]
    assert verdicts == [SKIP] * MAX_SKIPPED + [GIVE_UP]
