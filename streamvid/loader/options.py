"""Option objects of VideoLoader. Each of them groups related options and may also be given as a mapping."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.loader.view.audio import AudioOptions
from streamvid.plan.cost import CostTable
from streamvid.plan.mix import MixBy
from streamvid.plan.options import Order, PlanOptions
from streamvid.video.picture import Accuracy, Pixels

Layout: TypeAlias = Literal["BCTHW", "BTCHW", "BTHWC"]
Tokenizer: TypeAlias = Callable[[list[str]], Any]

DEFAULT_PREFETCH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Format of the delivered samples, and records of the deliveries."""

    layout: Layout = option("BCTHW", help="Axis order of `batch.video`, which is uint8 RGB.")
    pixels: Pixels | None = option(
        None,
        help="Pixel format of batches in memory. `yuv420p` takes half as much memory as `rgb24`, and is "
        "converted to RGB exactly, on the device.",
        shown_default="yuv420p with a CUDA device and even bucket sizes, otherwise rgb24",
    )
    accuracy: Accuracy | None = option(
        None,
        help="Accuracy of the conversion to RGB. `fast` uses swscale's default conversion, whose results are 1 to 3 "
        "levels too dark. Cannot be combined with pixels='yuv420p'.",
        shown_default=(
            "exact for clips that are scaled anyway, otherwise fast; exact takes 1.4 to 1.6 times as much CPU"
        ),
    )
    decode: bool = option(
        True,
        help="Decode clips. If False, the loader delivers the stored bytes as `batch.clips`, for your own decoder.",
    )
    tokenizer: Tokenizer | None = option(
        None,
        help="Function that converts a batch's texts (a list of str) to `batch.text_tokens` (int64) and "
        "`batch.text_mask` (bool), both with shape (B, L). The loader calls it once per batch in the "
        "caller's thread, while "
        "workers decode.",
    )
    audio: AudioOptions | None = option(
        None, help="Audio to deliver as `batch.audio`, float32 with shape (B, channels, samples); see AudioOptions."
    )
    ledger: str | Path | None = option(
        None, help="Local folder, shared by all ranks and runs, for a log of every delivered sample."
    )
    metrics_port: int | None = option(
        None,
        help=(
            "Base port for Prometheus metrics endpoints; each rank listens on the base port plus its local rank. "
            "Requires the streamvid[metrics] extra."
        ),
        shown_default="STREAMVID_METRICS_PORT, otherwise no endpoint",
        minimum=1,
        maximum=65535,
    )
    metrics_host: str = option("127.0.0.1", help="Address that the metrics endpoints listen on.")
    metrics_folder: str | Path | None = option(
        None, help="Local folder in which each rank writes a statistics file, with one JSON line every 10 seconds."
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.pixels == "yuv420p" and self.accuracy is not None:
            raise ConfigError(
                f"accuracy={self.accuracy!r} cannot be combined with pixels='yuv420p', which is always converted to "
                "RGB exactly; omit one of them"
            )
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise ConfigError(
                f"tokenizer={self.tokenizer!r}: must be a function that accepts a list of texts, for example "
                "lambda texts: tokenizer(texts, padding=True)"
            )
        _check_folder("ledger", self.ledger)
        _check_folder("metrics_folder", self.metrics_folder)


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Order of the delivered samples, and number of samples per epoch."""

    window: int = option(16, help="Size of the shuffle window in shards, for shuffle=window.")
    order: Order = option(
        "mixed",
        help="Order of steps. With `largest-first`, epoch 0 begins with one step for each bucket, in order of "
        "decreasing cost.",
    )
    shard_locality: int = option(
        64,
        help="Number of consecutive samples of a step to sort by shard before they are assigned to ranks. "
        "Higher values mean fewer requests per sample.",
    )
    costs: CostTable | None = option(
        None,
        help="Step costs, as returned by `fit_costs`, for sync=cost and order=largest-first.",
        shown_default="predicted from token counts",
    )
    samples_per_epoch: int | None = option(
        None,
        help="Number of samples per epoch, for datasets with weights.",
        shown_default="the number of samples in the datasets",
        minimum=1,
    )
    mix_by: MixBy = option("samples", help="Unit in which dataset weights are measured.")
    follow: bool = option(
        False,
        help="Begin each epoch with the newest version of each dataset. If False, keep using the versions that were "
        "opened.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.costs is not None and not isinstance(self.costs, CostTable):
            raise ConfigError(
                f"costs={reprlib.repr(self.costs)}: must be the result of streamvid.fit_costs or CostTable.from_json"
            )
        PlanOptions(window=self.window, order=self.order, shard_locality=self.shard_locality)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits on memory, time and bad samples."""

    prefetch_bytes: int = option(
        DEFAULT_PREFETCH_BYTES,
        help="Memory for decoded video, in bytes. Increased automatically if three of the largest batches need more.",
        minimum=0,
    )
    sample_timeout_seconds: float | None = option(
        60.0, help="Time limit in seconds for each read and each decode, or None for no limit.", above=0.0
    )
    max_bad_fraction: float = option(
        0.01,
        help="Maximum share of substituted samples on this rank, calculated over at least 1000 samples. The run "
        "fails if the share exceeds this value. A missing shard, or a bucket with no good samples, always ends "
        "the run.",
        minimum=0.0,
        maximum=1.0,
    )
    quarantine: str | Path | None = option(None, help="Local folder for lists of substituted samples.")

    def __post_init__(self) -> None:
        check_options(self)
        _check_folder("quarantine", self.quarantine)


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """torch.distributed groups whose processes compare their plans and batches."""

    process_group: Any = option(
        None,
        help="Process group whose members compare their plans at the start of each loop.",
        shown_default="all processes if `world` matches the ranks of torch.distributed, otherwise none",
    )
    shared_group: Any = option(
        None,
        help="Processes that receive the same batches as this rank (sequence, tensor or context parallelism); they "
        "verify that each batch is the same. Requires `world`.",
    )


def _check_folder(name: str, folder: object) -> None:
    """Raise ConfigError if an option's value is neither a local folder nor None."""
    if folder is not None and (not isinstance(folder, str | Path) or "://" in str(folder)):
        raise ConfigError(f"{name}={folder!r}: must be the path to a local folder (not a URL), or None")
