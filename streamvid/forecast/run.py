"""Input and result of `streamvid plan`: a planned run and its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from streamvid.buckets.config import BucketConfig
from streamvid.config import check_options, option
from streamvid.errors import StreamvidError
from streamvid.forecast.host import Estimates, HostCosts, HostMemory
from streamvid.plan.cost import CostTable
from streamvid.plan.options import PlanOptions
from streamvid.plan.position import MAX_NUM_RANKS

if TYPE_CHECKING:
    from streamvid.forecast.counts import RunCounts
    from streamvid.forecast.loads import LoadSummary
    from streamvid.sharder.source.summary import InputSummary


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """Run to forecast. Most fields are arguments of VideoLoader.

    costs: measured step costs; None to predict them from tokens.
    details: True to add loads and memory and, for a sealed dataset, bucket shapes and time, which are computed from the
        samples index.
    """

    num_ranks: int = option(1, help="Number of data-parallel ranks.", minimum=1, maximum=MAX_NUM_RANKS)
    batch_size: int | Mapping[str, int] | BucketConfig | None = None
    max_tokens_per_batch: int | None = option(
        None, help="Maximum number of tokens per batch, as an alternative to --batch-size."
    )
    options: PlanOptions = option(default_factory=PlanOptions)
    num_epochs: int = option(1, flag="--epochs", help="Number of epochs.", minimum=1, maximum=1000)
    split: str = option("train", help="Dataset split to plan for.")
    where: str | None = option(
        None, metavar="CONDITION", help="Condition on columns that selects samples, as in VideoLoader(where=…)."
    )
    costs: CostTable | None = None
    host: HostCosts = field(default_factory=HostCosts)
    prefetch_bytes: int = 256 * 2**20
    details: bool = False
    preset: str | None = None

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BucketShape:
    """Losses from fitting clips into one bucket, computed from the samples that were read.

    crop_mean: mean share of the picture that is cropped; None if the index does not record cropping.
    crop_max: maximum share of the picture that is cropped; None if the index does not record cropping.
    upscale_mean: mean upscaling factor; None if the index does not record upscaling.
    frames_unused_share: share of the clips' frames that one pass does not deliver.
    bytes_mean: mean size of a stored clip or source file, in bytes.
    expected: expected number of metadata rows for the bucket.
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
    """Facts about the sealed dataset for which a forecast was made.

    num_shards: maps each bucket id to the number of shards that the run uses.
    """

    plan_fingerprint: str
    split: str
    where: str | None
    preset: str | None
    num_shards: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LeftOutRow:
    """Metadata row that is not assigned to a bucket."""

    row: int
    source: str
    reason: str


@dataclass(slots=True)
class LeftOut:
    """Metadata rows that were not assigned to a bucket, all for the same kind of reason.

    expected: expected number of these rows.
    """

    kind: str
    num_rows: int = 0
    expected: Fraction = Fraction(0)
    examples: list[LeftOutRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class MetadataFacts:
    """Facts about the metadata for which a forecast was made.

    columns: maps each fact, such as width, to the name of the column that contains it.
    num_groups: number of groups of rows that have the same possible buckets.
    left_out: rows that are not assigned to a bucket, grouped by kind of reason, most frequent first.
    """

    columns: Mapping[str, str]
    bucket_config: Mapping[str, Any]
    num_rows: int
    num_groups: int
    frames_are_estimated: bool
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True, slots=True)
class RunDetails:
    """Loads, memory and time for the first epoch.

    estimates: time estimates; None for metadata, because clip sizes are unknown.
    """

    loads: LoadSummary
    memory: HostMemory
    estimates: Estimates | None


@dataclass(frozen=True, slots=True)
class RunForecast:
    """Forecast for a run.

    about: facts about the source.
    input: description of how the source was interpreted.
    shapes: maps each bucket id to the shape of the bucket; empty for a dataset without `details`.
    details: loads, memory and time; None if they were not requested, or if the run has no steps.
    failure: error that the run would raise before its first step; None if the run has at least one step.
    """

    source: str
    about: DatasetFacts | MetadataFacts
    input: InputSummary
    counts: RunCounts
    cost_classes: Mapping[str, int] | None
    costs_are_measured: bool
    shapes: Mapping[str, BucketShape]
    details: RunDetails | None
    failure: StreamvidError | None
    notes: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["dataset", "metadata"]:
        """Kind of the source: "dataset" or "metadata"."""
        return "dataset" if isinstance(self.about, DatasetFacts) else "metadata"

    def to_json(self) -> dict[str, Any]:
        """Return the forecast as JSON-serializable values, with the counts at the top level and without `failure`."""
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
