"""What a loader spent its time and its bytes on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class BatchStats:
    """What one batch cost; seconds are summed over its samples, which are worked on at the same time."""

    fetch_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_bytes_fetched: int = 0
    num_retries: int = 0
    num_substituted: int = 0
