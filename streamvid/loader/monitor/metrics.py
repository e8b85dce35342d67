"""Prometheus metrics for the loaders in this process, served by an HTTP endpoint.

All loaders of a process that use the same address share one endpoint. The endpoint calls `loader.stats()` for each
request, so it needs no resources between requests.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, count
from typing import TYPE_CHECKING, Any

from streamvid.config import require_integer
from streamvid.errors import ConfigError
from streamvid.loader.options import OutputOptions
from streamvid.loader.stats import WAIT_BOUNDS, LoaderStats
from streamvid.loader.world import local_rank

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_log = logging.getLogger("streamvid.loader")

PORT_VARIABLE = "STREAMVID_METRICS_PORT"
_MAX_PORT = 65535
_Figure = Callable[[LoaderStats], float]
_NUMBERS = count()  # of the loaders in this process

_COUNTERS: dict[str, tuple[str, _Figure]] = {
    "steps": ("Batches delivered to the caller.", lambda stats: stats.num_steps),
    "samples": ("Samples delivered to the caller.", lambda stats: stats.num_samples),
    "seconds": ("Time since the first batch was requested.", lambda stats: stats.seconds),
    "batch_seconds": ("Time spent building batches.", lambda stats: stats.batch_seconds),
    "fetch_seconds": ("Time spent reading, summed over samples.", lambda stats: stats.work.fetch_seconds),
    "decode_seconds": ("Time spent decoding, summed over samples.", lambda stats: stats.work.decode_seconds),
    "fetched_bytes": ("Bytes read for samples.", lambda stats: stats.work.num_bytes_fetched),
    "reread_samples": ("Samples read again because their bytes were wrong.", lambda stats: stats.work.num_retries),
    "substituted_samples": ("Bad samples replaced by other samples.", lambda stats: stats.work.num_substituted),
}
_GAUGES: dict[str, tuple[str, _Figure]] = {
    "queue_depth": ("Complete batches that are ready.", lambda stats: stats.queue_depth),
    "ring_batches": ("Batches that occupy memory in the ring.", lambda stats: stats.ring_batches),
}
_HELD_UP: dict[str, _Figure] = {
    "store": lambda stats: stats.work.store_wait_seconds,
    "decode": lambda stats: stats.work.decode_wait_seconds,
    "memory": lambda stats: stats.work.memory_wait_seconds,
    "prepare": lambda stats: stats.work.prepare_wait_seconds,
}
_NOW = {"p50_seconds", "p99_seconds", "num_bytes", "max_bytes"}  # of StoreStats and CacheStats: not sums

Stats = Callable[[], LoaderStats]


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Address of a Prometheus metrics endpoint.

    is_required: False if the address comes from an environment variable, because several programs may share the
        variable.
    """

    host: str
    port: int
    is_required: bool


def metrics_address(output: OutputOptions, environ: Mapping[str, str] | None = None) -> MetricsAddress | None:
    """Return the address of this rank's metrics endpoint, or None if the rank has no endpoint.

    The local rank is added to the port.

    Raises ConfigError for an invalid port, or if prometheus-client is not installed.
    """
    text = (os.environ if environ is None else environ).get(PORT_VARIABLE, "")
    port, name = output.metrics_port, "output.metrics_port"
    if port is None and text:
        name = PORT_VARIABLE
        if not text.isdecimal():
            raise ConfigError(
                f"{name}={text!r}: must be a port number from 1 to {_MAX_PORT}; correct or unset the variable"
            )
        port = int(text)
    if port is None:
        return None
    port = require_integer(f"{name} plus the local rank", port + local_rank(), 1, _MAX_PORT)
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(f"{name}={port} requires the prometheus-client package; run pip install 'streamvid[metrics]'")
    return MetricsAddress(output.metrics_host, port, is_required=output.metrics_port is not None)


class LoaderMetrics:
    """Collector for one loader's statistics. Metrics have the labels rank, split and loader (the loader's number)."""

    def __init__(self, stats: Stats, rank: int, split: str) -> None:
        self._stats = weakref.WeakMethod(stats)  # a bound method
        self._labels = {"rank": str(rank), "split": split, "loader": str(next(_NUMBERS))}

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, or nothing if the loader no longer exists."""
        method = self._stats()
        if method is not None:
            yield from families(method(), self._labels)


def families(stats: LoaderStats, labels: Mapping[str, str]) -> Iterator[Metric]:
    """Yield the metrics for a loader's statistics."""
    from prometheus_client.core import HistogramMetricFamily

    names, values = list(labels), list(labels.values())
    for name, (text, value) in _COUNTERS.items():
        yield _counter(name, text, names, [(values, value(stats))])
    for name, (text, value) in _GAUGES.items():
        yield _gauge(name, text, names, values, value(stats))
    yield _counter(
        "held_up_seconds",
        "Time that the caller waited, by cause of the wait.",
        [*names, "by"],
        [([*values, by], value(stats)) for by, value in _HELD_UP.items()],
    )
    waits = HistogramMetricFamily(_full("wait_seconds"), "Time that the caller waited for a batch.", labels=names)
    totals = accumulate(stats.wait_counts)
    buckets = [(f"{bound:g}", total) for bound, total in zip((*WAIT_BOUNDS, float("inf")), totals, strict=True)]
    waits.add_metric(values, [(bound.replace("inf", "+Inf"), total) for bound, total in buckets], stats.wait_seconds)
    yield waits
    for kind, found in (("store", stats.store), ("cache", stats.cache)):
        if found is not None:
            yield from _fields(kind, found, names, values)
    if stats.store is not None:
        errors = [([*values, cause], number) for cause, number in stats.store.by_error.items()]
        yield _counter("store_errors", "Failed requests, by cause.", [*names, "cause"], errors)


def _fields(kind: str, found: Any, names: list[str], values: list[str]) -> Iterator[Metric]:
    """Yield a metric for each number in a store's or a cache's statistics."""
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if not isinstance(value, int | float):
            continue
        text = f"{type(found).__name__}.{field.name} for this process."
        if field.name in _NOW:
            yield _gauge(f"{kind}_{field.name.removeprefix('num_')}", text, names, values, value)
        else:
            yield _counter(f"{kind}_{field.name.removeprefix('num_')}", text, names, [(values, value)])


def _full(name: str) -> str:
    return f"streamvid_loader_{name}"


def _counter(name: str, text: str, labels: list[str], rows: Sequence[tuple[list[str], float]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(_full(name), text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _gauge(name: str, text: str, labels: list[str], values: list[str], value: float) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(_full(name), text, labels=labels)
    family.add_metric(values, value)
    return family


# ---------------------------------------------------------------------------------------------- the endpoint


class _Endpoint:
    """HTTP endpoint that serves the metrics of several loaders."""

    def __init__(self, address: MetricsAddress) -> None:
        from prometheus_client import start_http_server

        self.loaders: list[LoaderMetrics] = []
        self._server, self._thread = start_http_server(address.port, address.host, registry=self)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all loaders, grouped into one metric family per name."""
        merged: dict[str, Metric] = {}
        for loader in list(self.loaders):
            for family in loader.collect():
                merged.setdefault(family.name, family)
                if merged[family.name] is not family:
                    merged[family.name].samples.extend(family.samples)
        yield from merged.values()

    def close(self) -> None:
        if threading.current_thread() is not self._thread:  # a destructor may run in any thread
            self._server.shutdown()
        self._server.server_close()


_endpoints: dict[tuple[int, str, int], _Endpoint] = {}
_lock = threading.RLock()  # reentrant, because a destructor may close an endpoint while another one opens


def open_metrics(address: MetricsAddress, loader: LoaderMetrics) -> Callable[[], None] | None:
    """Serve a loader's metrics at an address.

    Return a function that stops serving the metrics, or None if the port is not available.

    Raises ConfigError instead of returning None if an option requires the endpoint.
    """
    key = os.getpid(), address.host, address.port
    with _lock:
        try:
            endpoint = _endpoints.get(key) or _Endpoint(address)
        except OSError as error:
            text = (
                f"{address.host}:{address.port}: cannot serve metrics: {error.strerror or error}; choose another "
                f"output.metrics_port or {PORT_VARIABLE}, or another output.metrics_host"
            )
            if address.is_required:
                raise ConfigError(f"output.metrics_port: {text}") from error
            _log.warning("%s: %s", PORT_VARIABLE, text)
            return None
        _endpoints[key] = endpoint
        endpoint.loaders.append(loader)
    _log.info("metrics: http://%s:%d/metrics", address.host, address.port)
    return lambda: _close(key, loader)


def _close(key: tuple[int, str, int], loader: LoaderMetrics) -> None:
    with _lock:
        endpoint = _endpoints[key]
        endpoint.loaders.remove(loader)
        if not endpoint.loaders:
            del _endpoints[key]
            endpoint.close()
