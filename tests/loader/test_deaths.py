from energon.loader.deaths import MAX_SKIPPED, DeathRecord, Verdict

RETRY, SKIP, GIVE_UP = Verdict.RETRY, Verdict.SKIP, Verdict.GIVE_UP


def test_a_row_is_left_out_after_its_last_chance():
    record = DeathRecord(3)
    assert [record.died((0, 5)) for _ in range(3)] == [RETRY, RETRY, SKIP]


def test_deaths_at_a_row_count_however_many_batches_came_in_between():
    record = DeathRecord(2)
    assert record.died((0, 5)) is RETRY
    record.delivered()
    assert record.died((0, 5)) is SKIP


def test_deaths_without_a_row_end_the_run():
    record = DeathRecord(3)
    assert [record.died(None) for _ in range(3)] == [RETRY, RETRY, GIVE_UP]


def test_batches_in_between_are_a_new_start():
    record = DeathRecord(2)
    for _ in range(5):
        assert record.died(None) is RETRY
        record.delivered()


def test_deaths_at_ever_other_rows_end_the_run():
    record = DeathRecord(2)
    verdicts = [record.died((0, row)) for row in range(8)]
    assert verdicts == [RETRY] * 7 + [GIVE_UP]


def test_several_bad_rows_in_one_batch_do_not():
    record = DeathRecord(2)
    deaths = [record.died((0, row)) for row in range(MAX_SKIPPED) for _ in range(2)]
    assert deaths == [RETRY, SKIP] * MAX_SKIPPED


def test_too_many_bad_rows_in_one_batch_have_another_cause():
    record = DeathRecord(1)
    verdicts = [record.died((0, row)) for row in range(MAX_SKIPPED + 1)]
    assert verdicts == [SKIP] * MAX_SKIPPED + [GIVE_UP]
