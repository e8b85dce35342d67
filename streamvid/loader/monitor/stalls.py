"""Warnings that say why a caller has to wait for data."""

from __future__ import annotations

import logging

from streamvid.loader.stats import LoaderStats
from streamvid.loader.verdict import FEW_STEPS

_log = logging.getLogger("streamvid.loader")

_STALLED = 0.1  # share of the time
_LOOK_SECONDS = 30.0
_AGAIN_SECONDS = 300.0


class StallWatch:
    """Monitor for the share of time that a caller spends waiting. It logs a warning at most once every five minutes.

    The first 10 batches do not count, because workers and caches are cold. Every rank logs its own waits, because one
    slow rank delays all other ranks.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: LoaderStats | None = None
        self._quiet_until = 0.0

    def is_due(self, num_steps: int, seconds: float) -> bool:
        """Return whether `look` would compare statistics after this many steps and seconds."""
        if self._before is None:
            return num_steps >= FEW_STEPS
        return seconds - self._before.seconds >= _LOOK_SECONDS

    def look(self, stats: LoaderStats) -> None:
        """Compare the current statistics with the previous call's, and log a warning if the caller waited too long."""
        before, self._before = self._before, stats
        if before is None:
            return
        lately = stats.since(before)
        verdict = lately.verdict
        if verdict is None:
            self._before = before  # too few batches to tell
        elif lately.wait_share >= _STALLED and stats.seconds >= self._quiet_until:
            self._quiet_until = stats.seconds + _AGAIN_SECONDS
            _log.warning(
                "rank %d waited for data for %.0f%% of the last %.0f s: %s",
                self._rank,
                lately.wait_share * 100,
                lately.seconds,
                verdict,
            )
