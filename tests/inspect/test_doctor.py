"""What is said about measurements, whoever has measured them."""

from __future__ import annotations

from energon.inspect.doctor import Diagnosis, Measured, advice_for


def advice(
    *rates,
    stage="encode_sample",
    kind="process",
    read=1000.0,
    fetched=0.0,
    waited=0.0,
    sent=None,
    **about,
):
    """Return what is said of rates with 0, 1, 2, … workers."""
    measured = [Measured(n, kind, rate, 0.1, 2, fetched, waited) for n, rate in enumerate(rates)]
    about["transfer_per_second"] = sent
    found = Diagnosis(
        8.0, (read, read), measured, {stage: 0.9}, stage_per_second={stage: 50.0}, **about
    )
    return list(advice_for(found))


def test_the_slowest_stage_comes_with_what_makes_it_faster():
    assert advice(50.0, 90.0)[0] == (
        "one process spends 90% of its time in encode_sample; doing nothing else, it would "
        "reach 50 samples/s; to make that faster, move work out of encode_sample"
    )
    assert "decode to a smaller size" in advice(50.0, 90.0, stage="decode")[0]
    # The cache is measured, and has a sentence of its own.
    assert advice(50.0, 90.0, stage="read")[0].endswith("50 samples/s")
    assert "local disk" in advice(50.0, 90.0, stage="read", is_remote=True)[0]


def test_no_settings_are_said_to_be_faster_than_reading():
    assert "the best settings reach 9% of what reading alone does from the page cache" in advice(
        50, 90
    )
    assert "the best settings reach less than 1% of what" in "\n".join(advice(0.5, 0.9))
    assert not any("%" in each for each in advice(900.0, 1200.0)[1:])
    assert "the best settings are as fast as reading alone from the page cache" in advice(
        900.0, 1200.0
    )


def test_why_workers_are_no_faster():
    *_, last = advice(50.0, 51.0, sent=90.0)
    assert last == (
        "num_workers=0 is as fast as workers: one process sends 90 samples/s, and making them "
        "takes hardly longer"
    )
    *_, last = advice(50.0, 51.0, kind="thread", sent=90.0)
    assert "threads take turns where hooks run Python code" in last
    busy, *_, last = advice(50.0, 51.0, sent=500.0, waited=0.4)
    assert busy.startswith("the machine is busy: num_workers=0 waited for a CPU 40% of the time")
    assert last.endswith("the CPUs (8) are busy with something else")
    first, *_, last = advice(50.0, 51.0, sent=500.0)
    assert "busy" not in first
    assert last.endswith("more than 8 CPUs are needed for them to gain anything")


def test_workers_that_pay_are_named_with_their_gain():
    found = advice(50.0, 95.0, 180.0)
    assert "use num_workers=2, workers='process': 3.6 times as fast as in the training process" in (
        found
    )
    assert any("--try-workers 4" in each for each in found)


def test_a_store_is_blamed_only_while_it_is_read():
    remote = {"stage": "read", "is_remote": True, "read_bytes_per_second": 100e6}
    _, kept, *_ = advice(50.0, 51.0, fetched=8e4, **remote)
    assert kept.startswith("the store is read in the first epoch only")
    _, bound, last = advice(50.0, 51.0, fetched=8e6, **remote)
    assert "it delivers 8.0 MB/s, no matter how many workers ask" in bound
    assert last == "num_workers=0 is as fast as workers, which all wait for the store"
    _, bound, *_ = advice(50.0, 90.0, fetched=8e6, **remote)
    assert "the store limits the run: more workers make more requests at a time" in bound


def test_other_machines_are_named_when_the_cpus_here_are_too_few():
    rates = [50.0 * max(1, number) for number in range(9)]
    sends = {"sent": 5000.0, "sent_bytes": 200e3}
    assert advice(*rates, **sends)[-1] == (
        "all 8 CPUs are used: if training needs more samples, each Ray actor on another machine "
        "adds about 50 samples/s, and sends 10.0 MB/s over the network"
    )
    assert advice(*rates, **sends, needed_per_second=1000.0)[-1] == (
        "1,000 samples/s take the time of about 20 CPUs, and this machine has 8: add "
        "RayWorkers(num_actors=12) on other machines, which send 120.0 MB/s over the network"
    )


def test_other_machines_are_not_named_when_they_would_not_help():
    rates = [50.0 * max(1, number) for number in range(9)]
    sends = {"sent": 5000.0, "sent_bytes": 200e3}
    enough = advice(*rates, **sends, needed_per_second=400.0)
    few_used = advice(*rates[:4], **sends)
    sending = advice(*rates, sent=51.0, sent_bytes=200e3)
    store = advice(*rates, **sends, stage="read", is_remote=True, fetched=1e9)
    assert not any("Ray" in each for each in (*enough, *few_used, *sending, *store))
