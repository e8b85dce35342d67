"""Option objects of VideoLoader. Each groups the settings of one concern, and may be given as a mapping."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from streamvid.config import check_options, option
from streamvid.errors import ConfigError
from streamvid.plan.cost import CostTable
from streamvid.plan.mix import MixBy
from streamvid.plan.options import Order, PlanOptions
from streamvid.video.picture import Accuracy, Pixels

Layout: TypeAlias = Literal["BCTHW", "BTCHW", "BTHWC"]
Tokenizer: TypeAlias = Callable[[list[str]], Any]

DEFAULT_PREFETCH_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Form in which samples are delivered."""

    layout: Layout = option("BCTHW", help="Axis order of `batch.video`, which is RGB, uint8.")
    pixels: Pixels | None = option(
        None,
        help="Pixel format in the ring. yuv420p takes half the memory; the device converts it to RGB exactly.",
        shown_default="yuv420p with a CUDA device and buckets of even sizes, else rgb24",
    )
    accuracy: Accuracy | None = option(
        None,
        help="Conversion to RGB. fast is swscale's default, 1 to 3 levels too dark. Not with pixels=yuv420p.",
        shown_default="exact for clips that are scaled anyway, else fast, as exact would double the time",
    )
    decode: bool = option(True, help="False delivers `batch.clips`, the stored bytes, for a decoder of your own.")
    tokenizer: Tokenizer | None = option(
        None,
        help="Function that turns the texts of a batch, a list of str, into `batch.text_tokens`, int64 (B, L), and "
        "`batch.text_mask`, bool (B, L). Called once per batch in the caller's thread, while workers decode.",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.pixels == "yuv420p" and self.accuracy is not None:
            raise ConfigError(
                f"accuracy={self.accuracy!r}: cannot be combined with pixels='yuv420p', which is always converted to "
                "RGB exactly; leave one of them out"
            )
        if self.tokenizer is not None and not callable(self.tokenizer):
            raise ConfigError(
                f"tokenizer={self.tokenizer!r}: must be a function that takes a list of texts, such as "
                "lambda texts: tokenizer(texts, padding=True)"
            )


@dataclass(frozen=True, slots=True)
class ScheduleOptions:
    """Order in which samples are delivered, and their number per epoch."""

    window: int = option(16, help="Consecutive permuted shards whose samples shuffle=window permutes.")
    order: Order = option("mixed", help="largest-first begins with the first step of each bucket, the costliest first.")
    shard_locality: int = option(
        64,
        help="Consecutive samples of a step that are sorted by shard before ranks are assigned theirs. More samples "
        "mean fewer requests per sample.",
    )
    costs: CostTable | None = option(
        None,
        help="Costs of steps that `fit_costs` measured, for sync=cost and order=largest-first.",
        shown_default="predicted from token counts",
    )
    samples_per_epoch: int | None = option(
        None,
        help="Samples per epoch, for datasets with weights.",
        shown_default="as many as the datasets have",
        minimum=1,
    )
    mix_by: MixBy = option("samples", help="What the weights of datasets are shares of.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.costs is not None and not isinstance(self.costs, CostTable):
            raise ConfigError(
                f"costs={reprlib.repr(self.costs)}: must be what streamvid.fit_costs returned, or what "
                "CostTable.from_json made of it"
            )
        PlanOptions(window=self.window, order=self.order, shard_locality=self.shard_locality)


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """Limits of memory, time and bad samples."""

    prefetch_bytes: int = option(
        DEFAULT_PREFETCH_BYTES,
        help="Memory for decoded video ahead of the caller. The three largest batches always have room.",
        minimum=0,
    )
    sample_timeout_seconds: float | None = option(
        60.0, help="Time limit of one read and of one decode; None: no limit.", above=0.0
    )
    max_bad_fraction: float = option(
        0.01,
        help="Share of substituted samples above which the run fails, of the samples delivered to this rank or of "
        "1000, whichever is more. A bucket without a good sample and a missing shard always fail it.",
        minimum=0.0,
        maximum=1.0,
    )
    quarantine: str | Path | None = option(None, help="Local folder for this rank's list of substituted samples.")

    def __post_init__(self) -> None:
        check_options(self)
        if self.quarantine is not None and not isinstance(self.quarantine, str | Path):
            raise ConfigError(f"quarantine={self.quarantine!r}: must be the path of a local folder, or None")


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Groups of torch.distributed whose processes compare what they load."""

    process_group: Any = option(
        None,
        help="Processes that compare their plans when a loop begins.",
        shown_default="all processes, if `world` was detected as well",
    )
    shared_group: Any = option(
        None,
        help="Processes that share this rank's batches (sequence, tensor or context parallel) and compare each of "
        "them. Needs `world`.",
    )
