"""What Prometheus and OpenTelemetry get: the figures of `stats(flat=True)`, all of them."""

from __future__ import annotations

import gc
import re
import sys
import threading
import urllib.request

import pytest

from energon import (
    ConfigError,
    MissingExtraError,
    WorkerConfig,
    export_to_opentelemetry,
    export_to_prometheus,
    get_loader,
)
from energon import get_train_dataset as train
from energon.loader.monitoring import exporters
from energon.loader.monitoring.exporters import FIGURES, figures_of
from energon.loader.monitoring.monitor import flat_stats
from tests.datasets import make_crude
from tests.loader.monitoring.test_verdict import Choosing, Encoder

BATCHES = 12


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_crude(tmp_path_factory.mktemp("exported") / 'co"co', [60, 60])


def loaded(root, *, encoder=None, workers=2, rank=0, batches=BATCHES):
    config = WorkerConfig(rank=rank, world_size=2, num_workers=workers)
    dataset = train(root, worker_config=config, batch_size=4, task_encoder=encoder or Encoder(0.01))
    loader = get_loader(dataset, workers="thread", verdict_seconds=None)
    for _ in zip(range(batches), loader, strict=False):
        pass
    return loader


def test_figures_are_those_of_flat_stats(root):
    with loaded(root, encoder=Choosing()) as loader:
        stats = loader.stats()
    found = list(figures_of(stats))
    assert sorted(each.value for each in found) == sorted(flat_stats(stats).values())
    assert {each.name for each in found} <= set(FIGURES)
    labelled = [(each.name, tuple(sorted(each.labels.items()))) for each in found]
    assert len(labelled) == len(set(labelled))


@pytest.fixture
def endpoint():
    client = pytest.importorskip("prometheus_client")
    registry = client.CollectorRegistry()
    server, thread = client.start_http_server(0, addr="127.0.0.1", registry=registry)

    def scrape():
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            return answer.read().decode()

    yield registry, scrape
    server.shutdown()
    server.server_close()
    thread.join()


def parsed(text):
    """Return the samples of a scrape by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    return {
        (each.name, tuple(sorted(each.labels.items()))): each.value
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }


def test_prometheus_scrapes_an_endpoint(root, endpoint, monkeypatch):
    registry, scrape = endpoint
    monkeypatch.setattr(exporters, "COLLECTION_SECONDS", 0)
    with loaded(root, rank=1) as loader:
        export_to_prometheus(loader, registry=registry)
        found = parsed(scrape())
        run = (("loader", "train"), ("rank", "1"), ("window", "run"))
        assert found["energon_batches", run] == BATCHES - 1
        assert 0.1 < found["energon_wait_share", run] <= 1
        events = (("event", "batches"), ("loader", "train"), ("rank", "1"))
        assert found["energon_events_total", events] == BATCHES
        stages = {dict(labels).get("stage") for _, labels in found}
        datasets = {dict(labels).get("dataset") for _, labels in found}
        assert "encode_sample" in stages
        assert 'co"co/train' in datasets
        next(iter(loader))
        assert parsed(scrape())["energon_events_total", events] == BATCHES + 1
    assert parsed(scrape()) == {}


@pytest.mark.slow
def test_loaders_of_a_process_have_names_and_are_not_kept_alive(root, endpoint, monkeypatch):
    registry, scrape = endpoint
    monkeypatch.setattr(exporters, "COLLECTION_SECONDS", 0)
    first, second = loaded(root, workers=0), loaded(root, workers=0)
    export_to_prometheus(first, registry=registry)
    with pytest.raises(ConfigError, match="another loader is exported as 'train'"):
        export_to_prometheus(second, registry=registry)
    export_to_prometheus(second, registry=registry, name="validation")
    text = scrape()
    assert text.count("# TYPE energon_wait_share gauge") == 1
    assert {dict(labels)["loader"] for _, labels in parsed(text)} == {"train", "validation"}
    del first
    gc.collect()
    assert {dict(labels)["loader"] for _, labels in parsed(scrape())} == {"validation"}
    second.close()
    third = loaded(root, workers=0)
    export_to_prometheus(third, registry=registry, name="validation")
    assert {dict(labels)["loader"] for _, labels in parsed(scrape())} == {"validation"}
    third.close()


def test_opentelemetry_reads_the_same(root, caplog):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    with loaded(root) as loader, loaded(root, workers=0) as other:
        export_to_opentelemetry(loader, meter_provider=provider)
        export_to_opentelemetry(other, meter_provider=provider, name="validation")
        data = reader.get_metrics_data()
    found = {
        (metric.name, frozenset(point.attributes.items())): point.value
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }
    for name in ("train", "validation"):
        labels = {"loader": name, "rank": "0"}
        events = frozenset({**labels, "event": "batches"}.items())
        assert found["energon.events", events] == BATCHES
        run = frozenset({**labels, "window": "run"}.items())
        assert found["energon.batches", run] == BATCHES - 1
    stages = {dict(labels).get("stage") for _, labels in found}
    assert "encode_sample" in stages
    assert not caplog.records
    provider.shutdown()


@pytest.mark.parametrize(
    ("export", "package", "extra"),
    [
        (export_to_prometheus, "prometheus_client", "prometheus"),
        (export_to_opentelemetry, "opentelemetry.metrics", "opentelemetry"),
    ],
)
def test_what_to_install_is_said(root, export, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with loaded(root, workers=0, batches=1) as loader:
        text = re.escape(f"pip install 'energon-loader[{extra}]'")
        with pytest.raises(MissingExtraError, match=text):
            export(loader)


@pytest.mark.slow
def test_figures_may_be_asked_for_while_the_trainer_goes_on(root):
    """Scrapes come from threads of servers, at any time: also while a loader is closed."""
    failures, done = [], threading.Event()
    loader = loaded(root, workers=2, batches=1)

    def ask():
        while not done.is_set():
            try:
                assert loader.stats(flat=True)["batches"] > 0
                loader.verdict()
            except BaseException as error:
                failures.append(error)
                return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for _ in range(4):
            for _ in zip(range(5), loader, strict=False):
                pass
            loader.close()
    finally:
        done.set()
        asking.join()
    assert not failures, failures
