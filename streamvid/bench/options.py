"""Options for `streamvid bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.video.picture import Accuracy, Pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Options for a benchmark. Fields that are also arguments of VideoLoader have the same meaning there.

    batch_size: samples per rank per step; None means 4, unless `max_tokens_per_batch` is set.
    """

    batch_size: int | Mapping[str, int] | None = None
    max_tokens_per_batch: int | None = option(
        None, help="Maximum number of tokens per batch, as an alternative to --batch-size."
    )
    num_workers: tuple[int, ...] = option(
        (), help="Worker counts to measure.", metavar="LIST", shown_default="1,2,4 … all cores"
    )
    seconds: float = option(5.0, help="Duration of each measurement, in seconds.", minimum=0.001, maximum=3600)
    split: str = option("train", help="Dataset split to read.")
    where: str | None = option(
        None, help="Read only samples that satisfy this condition, such as 'duration_seconds > 10'."
    )
    pixels: Pixels | None = option(None, help="Pixel format of batches.", shown_default="the loader's")
    accuracy: Accuracy | None = option(None, help="Accuracy of the conversion to RGB.", shown_default="the loader's")
    device: str | None = option(None, help="Device to copy batches to, such as cuda.", shown_default="none")
    prefetch_bytes: int = option(256 * 2**20, help="Memory for prefetched batches and clips.")
    step_seconds: float | None = option(
        None,
        help="Seconds per training step, used to compute the required number of workers.",
        minimum=1e-9,
        maximum=3600,
    )
    num_local_ranks: int = option(
        1, flag="--local-ranks", help="Number of ranks (GPUs) on this machine, used with --step-seconds.", minimum=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        if any(number < 0 for number in self.num_workers) or len(set(self.num_workers)) < len(self.num_workers):
            raise ConfigError(f"num_workers={list(self.num_workers)}: must be distinct integers, each at least 0")
