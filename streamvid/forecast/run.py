"""Input and result of `streamvid plan`: a planned run, and its deliveries and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import Any, Literal

from streamvid.buckets.config import BucketConfig
from streamvid.config import check_options, option
from streamvid.errors import StreamvidError
from streamvid.forecast.counts import RunCounts
from streamvid.forecast.host import Estimates, HostCosts, HostMemory
from streamvid.forecast.loads import LoadSummary
from streamvid.plan.cost import CostTable
from streamvid.plan.options import PlanOptions
from streamvid.plan.position import MAX_NUM_RANKS


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The run to forecast, in the terms of VideoLoader.

    costs: measured step costs; None: predicted from tokens.
    details: also read the samples index, for shapes, bytes, memory and time; False: counts only.
    """

    num_ranks: int = option(1, help="Data-parallel ranks of the run.", minimum=1, maximum=MAX_NUM_RANKS)
    batch_size: int | Mapping[str, int] | BucketConfig | None = None
    max_tokens_per_batch: int | None = option(None, help="Maximum tokens per batch, instead of --batch-size.")
    options: PlanOptions = option(default_factory=PlanOptions)
    num_epochs: int = option(1, flag="--epochs", help="Epochs of the run.", minimum=1, maximum=1000)
    split: str = option("train", help="Split of the dataset.")
    where: str | None = option(None, metavar="CONDITION", help="Condition on columns, as VideoLoader(where=…).")
    costs: CostTable | None = None
    host: HostCosts = field(default_factory=HostCosts)
    prefetch_bytes: int = 256 * 2**20
    details: bool = False
    preset: str | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BucketShape:
    """Loss from fitting clips into one bucket, as means over the samples that were read.

    The shares are None if the index does not record them. `crop_mean` and `crop_max` are shares of the picture,
    `upscale_mean` is a factor, `frames_unused_share` is the share of the clips' frames that one pass does not deliver.
    bytes_mean: of a stored clip, or of a source file.   expected: mean number of metadata rows for the bucket.
    """

    num_samples: int
    crop_mean: float | None
    crop_max: float | None
    upscale_mean: float | None
    frames_unused_share: float
    frames_mean: float
    bytes_mean: float
    seconds_mean: float | None = None
    expected: float | None = None


@dataclass(frozen=True, slots=True)
class DatasetFacts:
    """Facts about a sealed dataset. num_shards: by bucket id, of the split and filter."""

    plan_fingerprint: str
    split: str
    where: str | None
    preset: str | None
    num_shards: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """One row of metadata that gets no bucket."""

    row: int
    source: str
    reason: str


@dataclass(slots=True)
class LeftOut:
    """Rows of metadata that get no bucket, of one kind. expected: their mean number over all draws."""

    kind: str
    num_rows: int = 0
    expected: Fraction = Fraction(0)
    examples: list[LeftOutRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MetadataFacts:
    """Facts about metadata. columns: fact → column.   num_groups: number of distinct kinds of rows.

    left_out: most frequent first.
    """

    columns: Mapping[str, str]
    bucket_config: Mapping[str, Any]
    num_rows: int
    num_groups: int
    frames_are_estimated: bool
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class RunDetails:
    """Needs of the first epoch. estimates: None for metadata, whose bytes are unknown before there are shards."""

    loads: LoadSummary
    memory: HostMemory
    estimates: Estimates | None


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast of a run.

    about: the source.   shapes: by bucket id; empty if only counts were requested.
    details: None if only counts were requested, and for a run without a step.
    failure: the error with which the run would end at once.
    """

    source: str
    about: DatasetFacts | MetadataFacts
    counts: RunCounts
    cost_classes: Mapping[str, int] | None
    costs_are_measured: bool
    shapes: Mapping[str, BucketShape]
    details: RunDetails | None
    failure: StreamvidError | None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["dataset", "metadata"]:
        """The kind of the source."""
        return "dataset" if isinstance(self.about, DatasetFacts) else "metadata"

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as plain JSON: `about` under its kind, counts at the top, the failure left out."""
        value = asdict(self, dict_factory=_plain)
        del value["failure"]
        return {
            "kind": self.kind,
            "source": value.pop("source"),
            self.kind: value.pop("about"),
            **value.pop("counts"),
            **value,
        }


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: float(value) if isinstance(value, Fraction) else value for name, value in pairs}
