"""streamvid plan: what a run would deliver, before a GPU is rented."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from streamvid.cli.console import print_json, table
from streamvid.cli.storage_flags import storage_flags
from streamvid.errors import ConfigError, DatasetError, PlanError, StreamvidError
from streamvid.plan.options import PlanOptions, Sync, Tail

if TYPE_CHECKING:
    from streamvid.dataset.reader import Dataset
    from streamvid.plan.plan import EpochPlan
    from streamvid.storage import StorageOptions

_MAX_EPOCHS = 1000
_MAX_SHOWN = 10
_COUNTS = ("num_delivered", "num_carried", "num_dropped", "num_repeated")
_EXAMPLES = """\b
Examples:
  streamvid plan ds/ --num-ranks 64 --batch-size 4
  streamvid plan ds/ --num-ranks 64 --batch-size '256px-*=8' --batch-size '480p-*=2'
  streamvid plan ds/ --num-ranks 64 --max-tokens-per-batch 60000 --epochs 3 --tail shrink
  streamvid plan ds/ --num-ranks 64 --batch-size 4 --json | jq .tails

\b
Exit codes: 0 the run has steps, 1 it has none or the dataset cannot be read, 2 wrong usage."""


@click.command(epilog=_EXAMPLES)
@click.argument("dataset", type=click.Path())
@click.option("--num-ranks", type=int, default=1, show_default=True, help="Data-parallel ranks of the run.")
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    metavar="N|BUCKET=N",
    help="Samples a rank and step. BUCKET: an id, WxH@F or glob; a name goes before globs, '*' is for all others.",
)
@click.option("--max-tokens-per-batch", type=int, help="Instead: as many samples of a bucket as fit.")
@click.option(
    "--tail",
    type=click.Choice(get_args(Tail)),
    help="The epoch's rest.  [default: as the loader, carry for split train, uneven for others]",
)
@click.option(
    "--sync", type=click.Choice(get_args(Sync)), default="bucket", show_default=True, help="What ranks share."
)
@click.option("--costs", type=click.Path(), help="Measured costs (JSON of a CostTable); needs --sync cost.")
@click.option("--epochs", "num_epochs", type=click.IntRange(1, _MAX_EPOCHS), default=1, show_default=True)
@click.option("--accumulate", type=int, default=1, show_default=True, help="Steps of an epoch are a multiple of it.")
@click.option("--split", default="train", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@storage_flags
def command(
    dataset: str,
    num_ranks: int,
    sizes: tuple[str, ...],
    max_tokens_per_batch: int | None,
    tail: Tail | None,
    sync: Sync,
    costs: str | None,
    num_epochs: int,
    accumulate: int,
    split: str,
    as_json: bool,
    storage: StorageOptions,
) -> None:
    """Show what training on a dataset would deliver: steps, and what is left out or repeated, by bucket and tail.

    Reads the shard table of the dataset and nothing else.
    """
    from streamvid.dataset.reader import open_dataset

    if costs is not None and sync != "cost":
        raise ConfigError(f"--costs {costs} does nothing with --sync {sync}; add --sync cost, or leave --costs out")
    tail = tail or ("carry" if split == "train" else "uneven")
    options = PlanOptions(tail=tail, sync=sync, accumulate=accumulate)
    batch_size = parse_sizes(sizes) if sizes else None
    run = PlannedRun(num_ranks, batch_size, max_tokens_per_batch, options, num_epochs, split, read_costs(costs))
    facts, failure = collect(open_dataset(dataset, storage=storage), run)
    if as_json:
        print_json(facts)
    else:
        _print(facts)
    if failure is not None:
        raise failure


def parse_sizes(sizes: Sequence[str]) -> int | dict[str, int]:
    """Batch sizes of `4`, or of `BUCKET=N` as often as given; ConfigError for anything else."""
    pairs: dict[str, int] = {}
    for text in sizes:
        name, equals, number = text.rpartition("=")
        if not number.isascii() or not number.isdigit() or bool(equals) != bool(name) or name in pairs:
            raise ConfigError(f"--batch-size {text!r}: expected N, or BUCKET=N once for each bucket or glob")
        pairs[name] = int(number)
    if "" in pairs and len(pairs) > 1:
        raise ConfigError(f"--batch-size {pairs['']} for all buckets beside others: write '*={pairs['']}' or name all")
    return pairs.get("", pairs)


def read_costs(path: str | None) -> Mapping[str, Any] | None:
    """The JSON of a cost table; ConfigError where there is none."""
    import json

    if path is None:
        return None
    try:
        value: Mapping[str, Any] = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--costs {path}: {error}; give a file with the JSON of CostTable.to_json()") from error
    return value


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What a run would ask of the loader; costs as `CostTable.to_json` gives them, None for the default."""

    num_ranks: int
    batch_size: int | Mapping[str, int] | None
    max_tokens_per_batch: int | None
    options: PlanOptions
    num_epochs: int
    split: str
    costs: Mapping[str, Any] | None = None


def collect(dataset: Dataset, run: PlannedRun) -> tuple[dict[str, Any], StreamvidError | None]:
    """(all of it as plain values, the error that such a run would end with at once, if any)."""
    from streamvid.buckets.batch_size import batch_sizes
    from streamvid.plan.cost import CostTable, cost_classes, default_costs
    from streamvid.plan.plan import EpochPlan

    counts = samples_of_shards(dataset, run.split)
    buckets = [dataset.manifest.bucket(bucket_id) for bucket_id in sorted(counts)]
    sizes = batch_sizes(buckets, run.batch_size, run.max_tokens_per_batch)
    costs = (default_costs(buckets) if run.costs is None else CostTable.from_json(run.costs)).costs(sizes)
    tails = [tail for tail in get_args(Tail) if tail != "uneven" or run.options.accumulate == 1]
    plans = {
        tail: EpochPlan(counts, sizes, replace(run.options, tail=tail), run.num_ranks, costs=costs) for tail in tails
    }
    epochs = {tail: _run(plan, run.num_epochs) for tail, plan in plans.items()}
    rows = _by_bucket(epochs[run.options.tail])
    facts = {
        "dataset": dataset.url,
        "plan_fingerprint": dataset.manifest.plan_fingerprint,
        **{name: getattr(run, name) for name in ("split", "num_ranks", "num_epochs")},
        **{name: getattr(run.options, name) for name in ("tail", "sync", "accumulate")},
        "steps": [epoch["steps"] for epoch in epochs[run.options.tail]],
        "buckets": [{**row, "shards": len(counts[row["bucket"]]), "batch_size": sizes[row["bucket"]]} for row in rows],
        "starved": [_starved(row, sizes[row["bucket"]], run) for row in rows if not row["num_delivered"]],
        "tails": [_tail_row(tail, of_tail) for tail, of_tail in epochs.items()],
        "cost_classes": cost_classes(costs) if run.options.sync == "cost" else None,
        "costs_are_measured": run.costs is not None,
    }
    try:
        plans[run.options.tail].check(run.num_epochs)
    except PlanError as error:
        return facts, error
    return facts, None


def samples_of_shards(dataset: Dataset, split: str) -> dict[str, Any]:
    """Bucket id → int64 array of the samples in each shard of a split, in the order that plans count them."""
    shards = dataset.shards
    if split not in shards.splits:
        raise DatasetError(
            f"split={split!r} has no samples in {dataset.url}; it has {', '.join(sorted(shards.splits))}"
        )
    return {bucket_id: shards.num_samples[rows] for bucket_id, rows in sorted(shards.select(split).items())}


def _run(plan: EpochPlan, num_epochs: int) -> list[dict[str, Any]]:
    """Steps and reports of the epochs of a run that is never broken off."""
    epochs = []
    for _ in range(num_epochs):
        epochs.append({"steps": plan.num_steps_left, "report": plan.report()})
        plan = plan.at(plan.next_epoch())
    return epochs


def _by_bucket(epochs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a bucket, summed over the epochs; what is carried is what the last one carries, none being left for it."""
    rows = []
    for of_epochs in zip(*(epoch["report"] for epoch in epochs), strict=True):
        last = of_epochs[-1]
        sums = {name: sum(getattr(report, name) for report in of_epochs) for name in _COUNTS}
        rows.append(
            {
                "bucket": last.bucket_id,
                "samples": last.num_samples,
                "global_batch": last.global_batch,
                "steps": sum(report.num_steps_left for report in of_epochs),
                **sums,
                "num_carried": last.num_carried,
            }
        )
    return rows


def _tail_row(tail: str, epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = _by_bucket(epochs)
    totals = {name: sum(row[name] for row in rows) for name in ("samples", *_COUNTS)}
    asked = totals["samples"] * len(epochs)
    left_out = totals["num_dropped"] + totals["num_carried"]
    return {
        "tail": tail,
        "steps": sum(epoch["steps"] for epoch in epochs),
        **{name: totals[name] for name in _COUNTS},
        "share_left_out": left_out / max(1, asked),
        "share_repeated": totals["num_repeated"] / max(1, totals["num_delivered"]),
        "starved_buckets": sum(not row["num_delivered"] for row in rows),
    }


def _starved(row: Mapping[str, Any], batch_size: int, run: PlannedRun) -> dict[str, Any]:
    """A bucket of which nothing is delivered, and what would change that."""
    samples, remedies = row["samples"], []
    if run.options.sync == "bucket" and samples >= run.num_ranks:
        remedies.append(f"batch size {samples // run.num_ranks}")
    if run.options.sync == "bucket" and samples >= batch_size:
        remedies.append(f"{samples // batch_size} rank(s)")
    if run.options.sync == "bucket" and samples and run.options.tail == "carry":
        remedies.append(f"{-(-row['global_batch'] // samples)} epochs")
    if samples:
        remedies.append("--tail pad or shrink")
    return {"bucket": row["bucket"], "samples": samples, "global_batch": row["global_batch"], "remedies": remedies}


def _print(facts: Mapping[str, Any]) -> None:
    headers = ["bucket", "samples", "batch", "a step", "steps", "delivered", "carried", "dropped", "repeated"]
    rows = [
        (b["bucket"], b["samples"], b["batch_size"], b["global_batch"], b["steps"], *(b[name] for name in _COUNTS))
        for b in facts["buckets"]
    ]
    click.echo(table(headers, rows))
    steps = facts["steps"]
    shown = ", ".join(map(str, steps[:_MAX_SHOWN])) + (", ..." if len(steps) > _MAX_SHOWN else "")
    click.echo(
        f"\n{facts['num_ranks']} ranks, tail {facts['tail']}, sync {facts['sync']}: {sum(steps)} steps in "
        f"{facts['num_epochs']} epoch(s): {shown}"
    )
    for starved in facts["starved"]:
        click.echo(
            f"starved: {starved['bucket']} has {starved['samples']} sample(s), a step takes "
            f"{starved['global_batch']}. Take {', or '.join(starved['remedies']) or 'it out of the dataset'}"
        )
    if facts["cost_classes"] is not None:
        _print_classes(facts)
    click.echo("\nAll tails, side by side:")
    click.echo(
        table(
            ["tail", "steps", "delivered", "left out", "repeated", "starved buckets"],
            [
                (
                    row["tail"] + (" *" if row["tail"] == facts["tail"] else ""), row["steps"], row["num_delivered"],
                    f"{row['share_left_out']:.2%}", f"{row['share_repeated']:.2%}", row["starved_buckets"],
                )
                for row in facts["tails"]
            ],
        )
    )  # fmt: skip


def _print_classes(facts: Mapping[str, Any]) -> None:
    members: dict[int, list[str]] = {}
    for bucket_id, number in facts["cost_classes"].items():
        members.setdefault(number, []).append(bucket_id)
    origin = "measured" if facts["costs_are_measured"] else "predicted from tokens, not measured"
    click.echo(f"\nBuckets that share steps, their costs within 10 % ({origin}):")
    for number, names in members.items():
        click.echo(f"  {number}: {', '.join(names)}")
