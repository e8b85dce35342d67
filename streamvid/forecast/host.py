"""Host memory that a run needs, and estimated time per epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from streamvid.buckets.bucket import Bucket
from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.video.picture import Pixels

_MOST = 1e12
EpochPart: TypeAlias = Literal["decode", "link", "requests", "gpu"]


@dataclass(frozen=True, slots=True)
class HostCosts:
    """Performance of one machine and its store, for time estimates.

    The defaults come from streamvid's own benchmarks (one core of a Zen 4 server, a store in the same region). They
    are not a measurement of your machine.

    decode_ms: maps a bucket id, WxH@F or glob to CPU milliseconds per sample.
    decode_ns_per_pixel, make_ns_per_pixel, sample_ms: CPU time for buckets without an entry in `decode_ms`, as
        nanoseconds per decoded pixel, nanoseconds per delivered pixel (scaling and conversion to RGB), and
        milliseconds per sample.
    num_workers: number of decode workers per rank.
    ranks_per_node: number of ranks on one machine, which share its network link.
    worker_bytes: memory per decode worker, in bytes.
    request_ms: milliseconds until the first byte of a response.
    requests_in_flight: number of concurrent requests per rank.
    link_mb_per_second: network bandwidth per machine, in megabytes per second.
    """

    decode_ms: Mapping[str, float] | None = None
    decode_ns_per_pixel: float = option(2.0, minimum=0, maximum=_MOST)
    make_ns_per_pixel: float = option(3.0, minimum=0, maximum=_MOST)
    sample_ms: float = option(0.5, minimum=0, maximum=_MOST)
    num_workers: int = option(8, minimum=1)
    ranks_per_node: int = option(8, minimum=1)
    worker_bytes: int = option(42 * 2**20, minimum=1)
    request_ms: float = option(30.0, minimum=0, maximum=_MOST)
    requests_in_flight: int = option(8, minimum=1)
    link_mb_per_second: float = option(1000.0, above=0)

    def __post_init__(self) -> None:
        check_options(self)
        for name, milliseconds in (self.decode_ms or {}).items():
            if not 0 <= milliseconds <= _MOST:
                raise ConfigError(f"decode_ms[{name!r}]={milliseconds!r}: must be a number from 0 to {_MOST:g}")


@dataclass(frozen=True, slots=True)
class RankWork:
    """Work that the busiest rank does in an epoch.

    gpu_seconds: GPU time, or None if step costs were not measured.
    """

    decode_cpu_seconds: float
    num_requests: float
    num_bytes: float
    gpu_seconds: float | None


@dataclass(frozen=True, slots=True)
class EpochTime:
    """Estimated duration of an epoch. Its parts overlap, so the longest part determines the duration."""

    seconds: float
    bound_by: EpochPart
    parts: Mapping[EpochPart, float | None]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates for one epoch, based on HostCosts.

    work: work that the busiest rank does if the dataset is in an object store.
    read_share: bytes read per byte of stored clips.
    num_samples_looked_at: number of samples from which requests and bytes are extrapolated.
    """

    work: RankWork
    epoch: EpochTime
    decode_ms_per_sample: Mapping[str, float]
    requests_per_sample: float
    read_share: float
    num_samples_looked_at: int
    host_costs: HostCosts


def epoch_time(work: RankWork, costs: HostCosts, num_ranks: int) -> EpochTime:
    """Return the estimated duration of an epoch and of each of its parts."""
    on_node = min(num_ranks, costs.ranks_per_node)
    parts: dict[EpochPart, float | None] = {
        "decode": work.decode_cpu_seconds / costs.num_workers,
        "link": work.num_bytes * on_node / (costs.link_mb_per_second * 1e6),
        "requests": work.num_requests * costs.request_ms / 1000 / costs.requests_in_flight,
        "gpu": work.gpu_seconds,
    }
    known = {name: seconds for name, seconds in parts.items() if seconds is not None}
    bound = max(known, key=lambda name: known[name])
    return EpochTime(known[bound], bound, parts)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Host memory that a run needs, in bytes.

    ring_bytes_yuv420p: ring size for yuv420p frames, or None if a bucket has an odd width or height, or if no bucket
        has pictures.
    """

    ring_bytes: int
    ring_bytes_yuv420p: int | None
    workers_bytes: int
    per_rank_bytes: int
    ranks_per_node: int
    per_node_bytes: int


def host_memory(
    buckets: Sequence[Bucket],
    batch_sizes: Mapping[str, int],
    max_clip_bytes: int,
    costs: HostCosts,
    prefetch_bytes: int,
    num_ranks: int,
) -> HostMemory:
    """Return the host memory that a run needs. The ring size is exact. Worker memory is estimated from the cost table.

    max_clip_bytes: size in bytes of the largest clip, or 0 if unknown.
    """
    from streamvid.loader.setup import loader_memory

    def ring(pixels: Pixels) -> int:
        return loader_memory(prefetch_bytes, max_clip_bytes, batch_sizes, buckets, pixels).num_bytes

    has_pictures = any(bucket.has_pictures for bucket in buckets)
    is_even = has_pictures and all(bucket.height % 2 == 0 and bucket.width % 2 == 0 for bucket in buckets)
    workers = costs.num_workers * costs.worker_bytes
    on_node = min(num_ranks, costs.ranks_per_node)
    per_rank = ring("rgb24") + workers
    return HostMemory(
        ring_bytes=ring("rgb24"),
        ring_bytes_yuv420p=ring("yuv420p") if is_even else None,
        workers_bytes=workers,
        per_rank_bytes=per_rank,
        ranks_per_node=on_node,
        per_node_bytes=per_rank * on_node,
    )
