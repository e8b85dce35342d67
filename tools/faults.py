"""Faults that tools.fault_proxy injects. The fault for a request depends only on a seed and the request's number."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field

OWN_ANSWERS = {
    "status_500": ("500 Internal Server Error", "InternalError"),
    "slow_down": ("503 Slow Down", "SlowDown"),
    "too_many": ("429 Too Many Requests", "TooManyRequests"),
    "expired": ("403 Forbidden", "ExpiredToken"),
}
UNKNOWN_HEADER = "unknown_header"
ANSWERS = {**OWN_ANSWERS, UNKNOWN_HEADER: ("501 Not Implemented", "NotImplemented")}
BODY_FAULTS = ("truncated", "slow", "flipped")
FAULTS = (*OWN_ANSWERS, "refused", "lost_answer", "reset", "stalled", "wrong_etag", *BODY_FAULTS)


@dataclass(frozen=True)
class Settings:
    """Faults to inject, and properties of the link. Times are in seconds unless a name says otherwise; 0 means off."""

    fault_rate: float = 0.0  # share of the requests that meet a fault
    first_n: int = 0  # the first n of the requests meet one, whatever the rate
    seed: int = 0
    faults: tuple[str, ...] = FAULTS
    methods: tuple[str, ...] = ()  # only requests of these methods are broken and numbered; none named: all
    path: str = ""  # only requests whose path and query this pattern is found in
    stall_s: float = 5.0
    slow_s: float = 2.0
    latency_ms: float = 0.0  # added before the first byte of each answer
    megabytes_per_second: float = 0.0  # of all connections together, each way
    unknown_header: str = ""  # in lower case: each request with it is answered with 501, whatever its number
    dead: bool = False  # every connection is reset, those that are open too

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"faults: {sorted(unknown)} are not valid; there are {', '.join(FAULTS)}")
        re.compile(self.path)


@dataclass
class Counts:
    """Counts since the start or since the last call of reset_counts()."""

    requests: dict[str, int] = field(default_factory=Counter)  # "GET /bucket/key" ─► times, without the query
    faults: dict[str, int] = field(default_factory=Counter)  # those that took place
    statuses: dict[str, int] = field(default_factory=Counter)  # "206" ─► times, as the client saw them
    connections: int = 0
    bytes_down: int = 0  # of bodies, to the client
    bytes_up: int = 0


def decide(settings: Settings, number: int, method: str) -> str | None:
    """Return the fault for the request with this number. The result depends only on the arguments."""
    kinds = [kind for kind in settings.faults if applies(kind, method)]
    digest = hashlib.blake2b(f"{settings.seed}:{number}".encode(), digest_size=16).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    if not kinds or (number >= settings.first_n and share >= settings.fault_rate):
        return None
    return kinds[int.from_bytes(digest[8:], "big") % len(kinds)]


def applies(kind: str, method: str) -> bool:
    if kind in BODY_FAULTS:
        return method == "GET"
    return kind != "lost_answer" or method not in ("GET", "HEAD")
