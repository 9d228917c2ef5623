"""Export the figures of loaders to Prometheus and OpenTelemetry.

Both receive the figures of `stats(flat=True)` under the same names; variable parts (stage, dataset,
store, worker, reason) become labels instead of paths. Each collection reads the current figures, in
the collecting thread; a loader that is closed or gone has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary, ref

from energon.errors import ConfigError, needs_extra

if TYPE_CHECKING:
    from energon.loader.loader import BasicDataLoader

EVENTS = "events"
FIGURES = {
    EVENTS: "Batches, samples, skips, failures and deaths since the loader was created, by event",
    "seconds_to_first_batch": "How long the trainer waited for the first batch",
    "seconds": "Length of the window",
    "batches": "Batches that the trainer received in the window",
    "samples": "Samples made in the window",
    "bytes": "Bytes of these samples in their shards",
    "batches_per_second": "Batches a second",
    "samples_per_second": "Samples a second",
    "bytes_per_second": "Bytes a second",
    "wait_share": "Share of the time that the trainer waited for batches",
    "busy_seconds": "How long workers were working",
    "idle_seconds": "How long finished batches waited for the trainer",
    "rebuild_seconds": "How long the trainer rebuilt batches sent by processes",
    "busy_share": "Share of the time that workers were working",
    "restarts": "Workers that died or hung and were restarted",
    "stage_seconds": "How long workers were in a stage",
    "stage_share": "Share of the work that a stage took",
    "stage_seconds_per_sample": "Time of a stage per sample",
    "stage_slow_calls": "Calls of a hook that took far longer than most",
    "stage_slow_seconds": "How long these calls took",
    "dataset_stage_seconds": "How long workers were in a stage for a dataset",
    "dataset_stage_seconds_per_sample": "Time of a stage per sample of a dataset",
    "dataset_stage_slow_calls": "Calls of a hook for a dataset that took far longer than most",
    "dataset_stage_slow_seconds": "How long these calls took",
    "store_events": "Requests, bytes, retries, stalls and cache hits of a store",
    "cache_events": "Hits and misses of the cache pool, and files that its disk could not take",
    "worker_pid": "Process id of a worker",
    "worker_ready_batches": "Finished batches of a worker that wait for the trainer",
    "worker_busy_share": "Share of the last minute that a worker was working",
    "worker_busy_seconds": "How long a worker was working in the last minute",
    "worker_cpu_share": "Share of a CPU that a worker used in the last minute",
    "worker_cpu_wait_share": "Share of the last minute that a worker waited for a CPU",
    "worker_memory_bytes": "Resident memory of a worker",
    "failures": "Samples on which a hook failed, by reason",
    "skips": "Samples that a hook skipped, by reason",
    "trainer_memory_bytes": "Resident memory of the training process",
    "all_workers_memory_bytes": "Resident memory of all worker processes",
    "balance_batch_cost": "Cost of the last batch, if batches are balanced",
    "balance_mean_cost": "Mean cost of the batches of its step, over all ranks",
    "balance_slowest_over_mean": "Cost of the slowest rank of the step over the mean, by its speed",
}
"""The figures and what they mean."""
COLLECTION_SECONDS = 0.5
"""Collections closer together than this see the same figures."""


class Figure(NamedTuple):
    """A number at some moment.

    Args:
        name: One of `FIGURES`.
        labels: What the number refers to.
        value: The number.
    """

    name: str
    labels: Mapping[str, str]
    value: float


def figures_of(stats: Mapping[str, Any]) -> Iterator[Figure]:
    """Yield the numbers in the statistics of a loader with their labels."""
    for window in ("run", "last_minute"):
        for name, labels, value in _window(stats[window]):
            yield Figure(name, {"window": window, **labels}, value)
    for worker in stats["workers"]:
        for name, value in worker.items():
            if name != "name" and value is not None:
                yield Figure(f"worker_{name}", {"worker": worker["name"]}, value)
    for name in ("failures", "skips"):
        for reason in stats[name]:
            labels = {each: str(reason[each]) for each in ("hook", "dataset", "reason")}
            yield Figure(name, labels, reason["count"])
    yield Figure("all_workers_memory_bytes", {}, stats["memory"]["worker_bytes"])
    if stats["memory"]["trainer_bytes"] is not None:
        yield Figure("trainer_memory_bytes", {}, stats["memory"]["trainer_bytes"])
    for name, value in stats.get("balance", {}).items():
        yield Figure(f"balance_{name}", {}, value)
    for name, value in stats.items():
        if name == "seconds_to_first_batch":
            yield Figure(name, {}, value)
        elif isinstance(value, int):
            yield Figure(EVENTS, {"event": name}, value)


def _window(figures: Mapping[str, Any]) -> Iterator[Figure]:
    for name, value in figures.items():
        if not isinstance(value, Mapping):
            yield Figure(name, {}, value)
    for store, counts in figures["stores"].items():
        for event, count in counts.items():
            yield Figure("store_events", {"store": store, "event": event}, count)
    for event, count in figures["cache"].items():
        yield Figure("cache_events", {"event": event}, count)
    for stage, of_stage in figures["stages"].items():
        for name, value in of_stage.items():
            if name != "datasets":
                yield Figure(f"stage_{name}", {"stage": stage}, value)
        for dataset, of_dataset in of_stage["datasets"].items():
            for name, value in of_dataset.items():
                labels = {"stage": stage, "dataset": dataset}
                yield Figure(f"dataset_stage_{name}", labels, value)


@dataclass(eq=False)
class ExportedLoaders:
    """Loaders whose figures go to the same place. They are not kept alive."""

    _loaders: dict[str, ref[BasicDataLoader]] = field(default_factory=dict)
    _collected: list[Figure] = field(default_factory=list)
    _collected_at: float | None = None
    _lock: Lock = field(default_factory=Lock)

    def add(self, loader: BasicDataLoader, name: str) -> None:
        """Collect the figures of a loader from now on.

        Raises:
            ConfigError: If another one has this name.
        """
        with self._lock:
            reference = self._loaders.get(name)
            other = None if reference is None else reference()
            if other is not None and other is not loader and other.is_open:
                raise ConfigError(
                    f"another loader is exported as {name!r}; choose a different name, as in "
                    'name="validation", or close that one first'
                )
            self._loaders[name] = ref(loader)
            self._collected_at = None

    def figures(self) -> list[Figure]:
        """Return the figures of all open loaders, labelled with loader and rank."""
        with self._lock:
            now = time.monotonic()
            if self._collected_at is None or now > self._collected_at + COLLECTION_SECONDS:
                self._collected = [
                    Figure(name, {**labels, "loader": each, "rank": rank}, value)
                    for each, rank, stats in self._stats()
                    for name, labels, value in figures_of(stats)
                ]
                self._collected_at = time.monotonic()
            return self._collected

    def _stats(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        for name, reference in list(self._loaders.items()):
            loader = reference()
            if loader is None:
                del self._loaders[name]
            elif loader.is_open:
                yield name, str(loader.worker_config.rank), loader.stats()


_exported: WeakKeyDictionary[Any, ExportedLoaders] = WeakKeyDictionary()


def export_to_prometheus(
    loader: BasicDataLoader, *, name: str = "train", registry: Any = None
) -> None:
    """Let Prometheus collect the metrics of `loader`, as `energon_…`.

    Args:
        loader: The loader. It is exported from its first batch until it is closed.
        name: Value of the label `loader`, to tell loaders of a process from each other.
        registry: A `prometheus_client.CollectorRegistry`; None for its `REGISTRY`.

    Raises:
        MissingExtraError: If prometheus_client is not installed.
        ConfigError: If another open loader has the same name.

    Example:
        >>> from prometheus_client import CollectorRegistry
        >>> from energon import WorkerConfig, get_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> registry = CollectorRegistry()
        >>> with get_loader(dataset) as loader:
        ...     export_to_prometheus(loader, registry=registry)
        ...     _ = next(iter(loader))
        ...     "energon_batches" in {figure.name for figure in registry.collect()}
        True
    """
    with needs_extra("prometheus", "export_to_prometheus needs prometheus_client"):
        from prometheus_client import REGISTRY
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    class Collector:
        def describe(self) -> Iterable[Any]:
            return []  # loaders are not queried when they are registered

        def collect(self) -> Iterator[Any]:
            by_name: dict[str, list[Figure]] = {}
            for figure in exported.figures():
                by_name.setdefault(figure.name, []).append(figure)
            for name, figures in by_name.items():
                labels = sorted(figures[0].labels)
                family = CounterMetricFamily if name == EVENTS else GaugeMetricFamily
                metric = family(f"energon_{name}", FIGURES[name], labels=labels)
                for each in figures:
                    metric.add_metric([each.labels[label] for label in labels], each.value)
                yield metric

    registry = REGISTRY if registry is None else registry
    exported = _exported_to(registry, lambda _: registry.register(Collector()))
    exported.add(loader, name)


def export_to_opentelemetry(
    loader: BasicDataLoader, *, name: str = "train", meter_provider: Any = None
) -> None:
    """Let OpenTelemetry collect the metrics of `loader`, as `energon.…`.

    Args:
        loader: The loader. It is exported from its first batch until it is closed.
        name: Value of the attribute `loader`, to tell loaders of a process from each other.
        meter_provider: An `opentelemetry.metrics.MeterProvider`; None for the global one.

    Raises:
        MissingExtraError: If opentelemetry-sdk is not installed.
        ConfigError: If another open loader has the same name.

    Example:
        >>> from energon import WorkerConfig, get_loader, get_train_dataset
        >>> config = WorkerConfig(rank=0, world_size=1, num_workers=0)
        >>> dataset = get_train_dataset("photos", worker_config=config, batch_size=4)
        >>> with get_loader(dataset) as loader:
        ...     export_to_opentelemetry(loader)  # to the global meter provider
        ...     _ = next(iter(loader))
    """
    with needs_extra("opentelemetry", "export_to_opentelemetry needs opentelemetry-sdk"):
        from opentelemetry.metrics import Observation, get_meter_provider

    def observe(figure: str, _: object) -> list[Any]:
        figures = exported.figures()
        return [Observation(each.value, each.labels) for each in figures if each.name == figure]

    def register(_: ExportedLoaders) -> None:
        meter = provider.get_meter("energon")
        for figure, meaning in FIGURES.items():
            make = meter.create_observable_gauge
            if figure == EVENTS:
                make = meter.create_observable_counter
            make(f"energon.{figure}", callbacks=[partial(observe, figure)], description=meaning)

    provider = get_meter_provider() if meter_provider is None else meter_provider
    exported = _exported_to(provider, register)
    exported.add(loader, name)


def _exported_to(target: Any, register: Callable[[ExportedLoaders], None]) -> ExportedLoaders:
    """Return the figures exported to a place, registering them there the first time."""
    exported = _exported.get(target)
    if exported is None:
        exported = ExportedLoaders()
        register(exported)
        _exported[target] = exported
    return exported
