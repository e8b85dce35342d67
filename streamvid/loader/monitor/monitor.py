"""Reports on a running loader, behind one interface for `loader.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from streamvid.host.resources import usable_cores
from streamvid.loader.delivery.pending import PendingBatch
from streamvid.loader.monitor.ledger import logged_batch, open_ledger, plan_facts
from streamvid.loader.monitor.metrics import LoaderMetrics, Stats, metrics_address, open_metrics
from streamvid.loader.monitor.metrics_log import MetricsLog
from streamvid.loader.monitor.stalls import StallWatch
from streamvid.loader.setup import Setup
from streamvid.loader.stats import StatsMeter
from streamvid.loader.verdict import Resources, Setting
from streamvid.loader.world import num_local_ranks
from streamvid.plan import Cursor


class Monitor:
    """Ledger, metrics and stall warnings of one loader. It holds no strong reference to the loader.

    resources: the loader's decoders and threads, used for verdicts.

    Raises ConfigError for invalid options. Methods raise StorageError if a file cannot be written.
    """

    def __init__(self, setup: Setup, split: str) -> None:
        self._split, self._pid = split, os.getpid()
        is_first = setup.shared_check is None or setup.shared_check.is_first
        self._ledger = open_ledger(setup.output.ledger, setup.selection) if is_first else None
        self.resources = _resources(setup)
        self._address, folder = metrics_address(setup.output), setup.output.metrics_folder
        self._end_metrics: Callable[[], None] | None = None
        self._log = None if folder is None else MetricsLog(Path(folder), setup.selection.world.rank, split)
        self._stalls = StallWatch(setup.selection.world.rank)

    def begin(self, setup: Setup, cursor: Cursor, is_again: bool, stats: Stats) -> None:
        """Record the start of a loop. Metrics are served from the first loop onward.

        setup: current setup of the loader; it changes with the versions of the datasets.
        is_again: True if the loader begins an epoch again after a `break`.
        stats: method of the loader that returns its statistics.
        """
        if self._address is not None:
            loader = LoaderMetrics(stats, setup.selection.world.rank, self._split)
            self._end_metrics, self._address = open_metrics(self._address, loader), None
        if self._ledger is not None:
            self._ledger.begin(plan_facts(setup.selection, self._split), cursor.to_json(), is_again)

    def hand_over(self, pending: PendingBatch, planned_keys: Mapping[int, str]) -> None:
        """Record a batch that is being handed over.

        planned_keys: maps the slot of each substitute to the key of the bad sample that it replaces.
        """
        if self._ledger is not None:
            self._ledger.add(logged_batch(pending, planned_keys))

    def watch(self, meter: StatsMeter, stats: Stats) -> None:
        """Write statistics if they are due, and log a warning if the caller waits too long.

        stats: see `begin`.
        """
        if self._log is not None:
            self._log.write(stats)
        if self._stalls.is_due(meter.num_steps, meter.seconds):
            self._stalls.look(stats())

    def finish(self, stats: Stats) -> None:
        """Write the final statistics.

        stats: see `begin`.
        """
        if self._log is not None:
            self._log.write(stats, is_last=True)

    def close(self) -> None:
        """Write the remaining statistics, close files and free the port.

        The method is idempotent, and has no effect in a forked process.
        """
        if os.getpid() != self._pid:
            return
        end, self._end_metrics = self._end_metrics, None
        try:
            if end is not None:
                end()
        finally:
            if self._ledger is not None:
                self._ledger.close()


def _resources(setup: Setup) -> Resources:
    clips = {part.dataset.manifest.clips for part in setup.mix.parts if part.sidecar is None}
    kind = "copy" if "copy" in clips else min(clips, default="features")
    setting = Setting(
        num_cores=max(1, usable_cores() // num_local_ranks()),
        clips=kind,
        pixels=setup.pipeline.pixels,
        accuracy=setup.output.accuracy or ("exact" if kind == "copy" else "fast"),
    )
    options = setup.pipeline
    return Resources(num_workers=options.num_workers, num_fetch_threads=options.num_fetch_threads, setting=setting)
