from energon.loader.memory import keep_heap


def test_zero_changes_nothing():
    assert not keep_heap(0)


def test_settings_of_the_user_come_first(monkeypatch):
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    assert not keep_heap(1 << 20)
