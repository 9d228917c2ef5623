import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon import RayWorkers, get_savable_loader
from energon.errors import ConfigError, WorkerError
from energon.loader.options import LoaderOptions
from energon.loader.workers import number_of_workers
from tests.loader.fake_pipeline import fake


def test_the_name_stands_for_the_defaults():
    assert LoaderOptions(workers="ray") == LoaderOptions(workers=RayWorkers())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_actors": 0}, "num_actors"),
        ({"num_cpus": -1}, "num_cpus"),
        ({"min_actors": 2}, "min_actors and max_actors belong together"),
        ({"min_actors": 3, "max_actors": 2}, "max_actors"),
        ({"num_actors": 3, "min_actors": 1, "max_actors": 2}, "either num_actors, or"),
        ({"pool": "decoders"}, "needs num_actors"),
        ({"address": "ray://head:10001"}, "batches cannot cross a Ray client"),
    ],
)
def test_wrong_arguments_are_errors(arguments, message):
    with pytest.raises(ConfigError, match=message):
        RayWorkers(**arguments)


def test_actors_are_as_many_as_workers_unless_given():
    config = fake(workers=3).worker_config
    assert number_of_workers(LoaderOptions(workers="ray"), config) == 3
    assert number_of_workers(LoaderOptions(workers=RayWorkers(num_actors=5)), config) == 5
    assert number_of_workers(LoaderOptions(workers="ray"), fake().worker_config) == 1


def test_a_missing_cluster_is_an_error():
    pytest.importorskip("ray")
    with (
        get_savable_loader(fake(), workers=RayWorkers(address="127.0.0.1:1")) as loader,
        pytest.raises(WorkerError, match=r"at 127\.0\.0\.1:1[:;]"),
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("in_use", "wait_share", "busy_share", "wanted"),
    [
        *[(1, 0.5, 1.0, 2), (4, 0.5, 1.0, 6), (7, 0.5, 1.0, 8), (8, 0.5, 1.0, 8)],  # it waits
        *[(4, 0.0, 0.5, 3), (4, 0.0, 0.6, 4), (1, 0.0, 0.1, 1)],  # they are idle, or busy
        (4, 0.03, 0.1, 4),  # neither
    ],
)
def test_actors_are_added_while_the_trainer_waits(in_use, wait_share, busy_share, wanted):
    pytest.importorskip("ray")
    from energon.loader.ray_actors.scaling import ActorScaling

    scaling = ActorScaling(1, 8, in_use=in_use)
    assert scaling._wanted(wait_share, busy_share) == wanted


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.floats(0, 1)), min_size=1, max_size=40
    )
)
def test_a_pool_grants_no_more_than_it_has(requests):
    pytest.importorskip("ray")
    from energon.loader.ray_actors.pool import PoolShares

    shares, used = PoolShares(6), {0: 2, 1: 2, 2: 2}
    for rank in used:
        shares.grant(rank, used=2, wanted=2, least=1, wait_share=0.0)
    for rank, wanted, wait_share in requests:
        used[rank] = shares.grant(
            rank, used=used[rank], wanted=wanted, least=1, wait_share=wait_share
        )
        assert used[rank] >= 1
        assert sum(used.values()) <= 6


@given(st.integers(2, 6), st.integers(1, 3))
def test_the_rank_that_waits_gets_what_all_others_can_spare(ranks, each):
    pytest.importorskip("ray")
    from energon.loader.ray_actors.pool import PoolShares

    shares, used = PoolShares(ranks * each), dict.fromkeys(range(ranks), each)
    for turn in range(2 * ranks * each + 1):
        for rank in used:
            waits = rank == 0 and turn > 0
            used[rank] = shares.grant(
                rank, used=used[rank], wanted=used[rank] + waits, least=1, wait_share=waits / 2
            )
    assert used == {0: ranks * (each - 1) + 1} | dict.fromkeys(range(1, ranks), 1)


def test_settings_that_hooks_change_are_restored(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    from energon.loader.ray_actors.actor import ProcessSettings

    monkeypatch.setenv("DEVICE", "cpu")
    monkeypatch.chdir(tmp_path)
    settings = ProcessSettings.present()
    monkeypatch.setenv("DEVICE", "cuda")
    monkeypatch.setenv("OF_A_HOOK", "1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir("/")
    logging.getLogger("hooks").setLevel(logging.DEBUG)
    settings.restore()
    assert ProcessSettings.present() == settings
