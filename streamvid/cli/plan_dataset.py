"""What `streamvid plan` says of a sealed dataset, as plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from streamvid.errors import StreamvidError
from streamvid.forecast.epochs import HostCosts, Loads, RankWork, epoch_seconds, forecast_counts, rank_loads
from streamvid.plan import Cursor
from streamvid.plan.options import PlanOptions

if TYPE_CHECKING:
    from streamvid.buckets.config import BucketConfig
    from streamvid.dataset.reader import Dataset
    from streamvid.forecast.reads import BucketScan, ReadSample
    from streamvid.loader.setup import Setup
    from streamvid.plan.cost import CostTable

_OPENING_REQUESTS = 10  # of a rank: manifest, shard table, footers


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What a run would ask of the loader; costs as `CostTable.to_json` gives them, None for the default.

    details: whether the samples index is read too, for waste, bytes, memory and time; else the shard table alone.
    """

    num_ranks: int
    batch_size: int | Mapping[str, int] | BucketConfig | None
    max_tokens_per_batch: int | None
    options: PlanOptions
    num_epochs: int
    split: str
    costs: Mapping[str, Any] | None = None
    where: str | None = None
    host: HostCosts = field(default_factory=HostCosts)
    prefetch_bytes: int = 256 * 2**20
    details: bool = False
    preset: str | None = None


def collect(dataset: Dataset, run: PlannedRun) -> tuple[dict[str, Any], StreamvidError | None]:
    """(all of it as plain values, the error that such a run would end with at once, if any)."""
    from streamvid.plan.cost import cost_classes

    setup = set_up_run(dataset, run)
    selection, counts = setup.selection, setup.mix.parts[0].counts
    facts, failure = forecast_counts(
        lambda options: replace(selection, options=options).plan(Cursor()),
        selection.batch_sizes, run.options, run.num_epochs,
    )  # fmt: skip
    for row in facts["buckets"]:
        row["shards"] = len(counts[row["bucket"]])
    about = {
        "kind": "dataset",
        "dataset": dataset.url,
        "plan_fingerprint": dataset.manifest.plan_fingerprint,
        "split": run.split,
        "where": run.where,
        "preset": run.preset,
    }
    costs = {
        "cost_classes": cost_classes(selection.costs) if run.options.sync == "cost" else None,
        "costs_are_measured": run.costs is not None,
    }
    details = _details(setup, run, facts) if run.details and failure is None else None
    return about | facts | costs | {"details": details}, failure


def set_up_run(dataset: Dataset, run: PlannedRun, rank: int = 0) -> Setup:
    """What a rank's VideoLoader would be made of."""
    from streamvid.forecast.reads import open_run

    options = {name: getattr(run.options, name) for name in run.options.__slots__}
    return open_run(
        dataset, run.num_ranks, rank, **options, split=run.split, where=run.where, batch_size=run.batch_size,
        max_tokens_per_batch=run.max_tokens_per_batch, preset=run.preset, prefetch_bytes=run.prefetch_bytes,
        costs=_measured(run) if run.options.sync == "cost" else None,
    )  # fmt: skip


def _measured(run: PlannedRun) -> CostTable | None:
    from streamvid.plan.cost import CostTable

    return None if run.costs is None else CostTable.from_json(run.costs)


def planned_keys(dataset: Dataset, run: PlannedRun) -> Iterator[dict[str, Any]]:
    """Every batch of every rank, rank by rank, in the order in which it is handed out."""
    from streamvid.forecast.reads import planned_batches

    for rank in range(run.num_ranks):
        for batch in planned_batches(set_up_run(dataset, run, rank), run.num_epochs):
            names = ("epoch", "step", "bucket_id", "keys", "member_bytes", "read_bytes", "num_repeats")
            yield {"rank": rank, **{name: getattr(batch, name) for name in names}}


def _details(setup: Setup, run: PlannedRun, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Of the first epoch, by the samples index: waste, loads of ranks, memory, requests and time."""
    from streamvid.forecast.reads import memory_of, sample_reads, scan_buckets
    from streamvid.loader.model_rule import rule_of, token_rule
    from streamvid.plan.cost import default_costs

    selection = setup.selection
    scans = scan_buckets(setup)
    measured = _measured(run)
    loads = rank_loads(
        selection.plan(Cursor()),
        selection.batch_sizes,
        default_costs(setup.buckets, token_rule(rule_of(run.preset), setup.mix)).tokens,
        selection.costs if measured is None else measured.costs(selection.batch_sizes),
        lambda name, shards, places: scans[name].sizes(shards, places),
    )
    reads = sample_reads(setup)
    return {
        "buckets": {name: scan.to_json() for name, scan in sorted(scans.items())},
        **loads.to_json(),
        "samples_by_rank": loads.samples_by_rank(),
        "member_bytes_by_rank": loads.bytes_by_rank(),
        "member_bytes_are_estimate": loads.is_sampled or any(scan.first is None for scan in scans.values()),
        "memory": memory_of(
            setup.buckets, selection.batch_sizes, setup.mix.max_clip_bytes, run.host, run.prefetch_bytes, run.num_ranks
        ),
        "estimates": _estimates(setup, run, facts, (scans, loads, reads)),
    }


def _estimates(
    setup: Setup, run: PlannedRun, facts: Mapping[str, Any], of: tuple[Mapping[str, BucketScan], Loads, ReadSample]
) -> dict[str, Any]:
    """What is no more than an estimate, under the run's table of costs."""
    from streamvid.forecast.reads import decode_ms, shards_of_a_rank

    scans, loads, reads = of
    decoding = {name: decode_ms(scan, reads, run.host) for name, scan in sorted(scans.items())}
    delivered = {row["bucket"]: row["num_delivered"] / run.num_epochs for row in facts["buckets"]}
    shards = shards_of_a_rank(setup)
    samples = max(loads.samples_by_rank())
    work = RankWork(
        decode_cpu_seconds=sum(decoding[name] * delivered[name] for name in scans) / 1000 / run.num_ranks,
        num_requests=samples * reads.requests_a_sample + 2 * shards + _OPENING_REQUESTS,
        num_bytes=max(loads.bytes_by_rank() or [0]) * reads.read_share,
        gpu_seconds=None if run.costs is None else loads.step_costs() / 1e9,
    )
    return {
        "samples_looked_at": reads.num_samples,
        "decode_cpu_ms_a_sample": decoding,
        "decode_cpu_seconds_a_rank": work.decode_cpu_seconds,
        "read_share_of_member_bytes": reads.read_share,
        "bytes_read_busiest_rank": work.num_bytes,
        "requests_a_sample": reads.requests_a_sample,
        "requests_busiest_rank": work.num_requests,
        "requests_are_of_an_object_store": True,
        "epoch": epoch_seconds(work, run.host, run.num_ranks),
        "host_costs": asdict(run.host),
    }
