"""Verdict on a loader: the part that limits it, the figures that show it, and the remedies.

`LoaderStats.verdict` and `streamvid bench` use the same rules. All functions are pure, and all values are frozen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

from streamvid.video.picture import Pixels

FEW_STEPS = 10
"""Number of batches below which figures are only rough."""

BUSY = 0.85
"""Minimum share of the time that a part must be busy to count as the limit."""

KEEPS_UP = 0.05
"""Maximum share of the time that a caller may wait before the data no longer counts as keeping up."""

_ROOM = 2  # samples per decoder: one being decoded, and one waiting

Limit: TypeAlias = Literal["caller", "decoders", "cores", "store", "main", "ring"]
LIMITS: Mapping[Limit, str] = {
    "caller": "the caller, such as the training step; the data keeps up",
    "decoders": "the decode workers; free cores remain for more workers",
    "cores": "decoding, on all available cores",
    "store": "the store",
    "main": "the main process",
    "ring": "memory: prefetch_bytes has room for fewer samples than the workers could decode simultaneously",
}
assert set(LIMITS) == set(get_args(Limit))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Run conditions that affect the remedies in a verdict.

    clips: form in which the clips are stored, "copy" or "native".
    """

    num_cores: int
    clips: str
    pixels: Pixels
    accuracy: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Decoders and reader threads of a loader, and the conditions under which the loader runs."""

    num_workers: int
    num_fetch_threads: int
    setting: Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of the time, from 0 to 1, during which the parts of a loader were busy.

    cores_busy: share for all available cores together; None if unknown.
    room: number of samples that fit into prefetch_bytes at the same time; None if unknown.
    held_up: maps each part of the loader to the seconds that the caller waited because of that part; empty if unknown.
    """

    num_workers: int
    decoders_busy: float
    store_busy: float
    main_busy: float
    cores_busy: float | None = None
    room: float | None = None
    held_up: Mapping[Limit, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a run: the part that limits it, the figures that show this, and the remedies, best first."""

    limit: Limit
    reasons: tuple[str, ...]
    advice: tuple[str, ...]

    def __str__(self) -> str:
        advice = f". To go faster: {'; '.join(self.advice)}" if self.advice else ""
        return f"the limit is {LIMITS[self.limit]} ({'; '.join(self.reasons)}){advice}"


def limit_of(usage: Usage, num_cores: int) -> Limit:
    """Return the part that limits a loader, assuming that the caller waits for data."""
    decoding: Limit = "cores" if max(1, usage.num_workers) >= num_cores else "decoders"
    if usage.decoders_busy >= BUSY:
        return decoding
    if usage.cores_busy is not None and usage.cores_busy >= BUSY:
        return "cores"
    shares: dict[Limit, float] = {"store": usage.store_busy, "main": usage.main_busy}
    busiest = max(shares, key=lambda name: shares[name])
    if shares[busiest] >= BUSY:
        return busiest
    if any(usage.held_up.values()):
        longest = max(usage.held_up, key=lambda name: usage.held_up[name])
        return decoding if longest in ("decoders", "cores") else longest
    # If decoders always have work waiting, the time that they spend between samples is part of their cost.
    return "ring" if usage.room is not None and usage.room < _ROOM * max(1, usage.num_workers) else decoding


def judge_loader(usage: Usage, wait_share: float, setting: Setting) -> Verdict:
    """Return the verdict on a loader in use.

    wait_share: share of the time during which the caller waited for the loader.
    """
    waited = f"the caller waited {wait_share:.0%} of the time"
    if wait_share < KEEPS_UP:
        return Verdict("caller", (waited,), ())
    limit = limit_of(usage, setting.num_cores)
    busy = (
        f"decoders ({max(1, usage.num_workers)}) were busy {usage.decoders_busy:.0%} of the time, and threads were "
        f"reading {usage.store_busy:.0%}"
    )
    return Verdict(limit, (waited, busy, *_causes(usage)), advice(limit, usage, setting))


def _causes(usage: Usage) -> tuple[str, ...]:
    total = sum(usage.held_up.values())
    causes = sorted(usage.held_up.items(), key=lambda item: -item[1])
    shown = [f"{_CAUSES[name]} {seconds / total:.0%}" for name, seconds in causes if seconds > total / 100]
    return (f"of the wait: {', '.join(shown)}",) if shown else ()


_CAUSES: Mapping[Limit, str] = {
    "caller": "caller",
    "decoders": "decoding",
    "cores": "decoding",
    "store": "reading",
    "main": "building batches",
    "ring": "memory",
}


def advice(limit: Limit, usage: Usage, setting: Setting) -> tuple[str, ...]:
    """Return the remedies for a limit, best first."""
    native = (
        "shard with --clips native: clips then have the bucket's size, and need a fraction of the CPU time and bytes"
    )
    cheaper = [native] if setting.clips == "copy" else []
    if setting.pixels == "rgb24":
        cheaper.append(
            "pixels='yuv420p', the default with device='cuda': batches have half the bytes, and the GPU converts them"
        )
    if setting.pixels == "rgb24" and setting.accuracy == "exact":
        cheaper.append("accuracy='fast', if pictures may be 1 to 3 levels too dark")
    if limit == "decoders":
        return (
            f"more workers: on {setting.num_cores} cores, the number of decoders was only {max(1, usage.num_workers)}",
            *cheaper,
        )
    if limit == "cores":
        return (*cheaper, "more cores: decoding scales with them")
    if limit == "store":
        near = "a faster store, or a copy of the dataset on a disk of this machine"
        return (near, *([native] if setting.clips == "copy" else []))
    if limit == "main":
        return (
            "larger batches, because each batch costs the main process about the same time",
            "more ranks, each with its own process",
        )
    if limit == "caller":
        return ()
    enough = max(1, math.ceil(usage.decoders_busy * max(1, usage.num_workers)))
    fewer = f"a num_workers of at most {enough}; the other workers had no work"
    return ("more prefetch_bytes, to have more samples in flight", *([fewer] if usage.num_workers else []))
