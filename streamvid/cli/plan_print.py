"""What `streamvid plan` prints for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from streamvid.cli.console import printable, size, table
from streamvid.forecast.epochs import COUNTS

_MAX_SHOWN = 10
_MAX_RANKS_SHOWN = 8


def print_plan(facts: Mapping[str, Any]) -> None:
    """All of it; estimates are marked with ~."""
    _print_counts(facts)
    if facts["cost_classes"] is not None:
        _print_classes(facts)
    _print_tails(facts)
    if facts["kind"] == "metadata":
        _print_waste(facts["metadata"]["buckets"], is_metadata=True)
        _print_left_out(facts["metadata"])
    if facts["details"] is not None:
        if facts["kind"] == "dataset":
            _print_waste(facts["details"]["buckets"], is_metadata=False)
        _print_loads(facts)
    for line in facts.get("notes", ()):
        click.echo(printable(f"note: {line}"))


def _print_counts(facts: Mapping[str, Any]) -> None:
    headers = ["bucket", "samples", "batch", "a step", "steps", "delivered", "carried", "dropped", "repeated"]
    rows = [
        (b["bucket"], b["samples"], b["batch_size"], b["global_batch"], b["steps"], *(b[name] for name in COUNTS))
        for b in facts["buckets"]
    ]
    click.echo(table(headers, rows))
    steps = facts["steps"]
    shown = ", ".join(map(str, steps[:_MAX_SHOWN])) + (", ..." if len(steps) > _MAX_SHOWN else "")
    click.echo(
        f"\n{facts['num_ranks']} ranks, tail {facts['tail']}, sync {facts['sync']}: {sum(steps)} steps in "
        f"{facts['num_epochs']} epoch(s): {shown}"
    )
    stored, due = (sum(b[name] for b in facts["buckets"]) for name in ("samples", "due"))
    if due != stored * facts["num_epochs"]:
        click.echo(f"{stored} samples are stored; {facts['num_epochs']} epoch(s) have {due}")
    for starved in facts["starved"][:_MAX_SHOWN]:
        click.echo(
            f"starved: {starved['bucket']} has {starved['samples']} sample(s), a step takes "
            f"{starved['global_batch']}. Take {', or '.join(starved['remedies']) or 'it out of the dataset'}"
        )
    more = facts["starved"][_MAX_SHOWN:]
    if more:
        click.echo(f"and {len(more)} more buckets of fewer samples than a step takes (--json names all)")


def _print_classes(facts: Mapping[str, Any]) -> None:
    members: dict[int, list[str]] = {}
    for bucket_id, number in facts["cost_classes"].items():
        members.setdefault(number, []).append(bucket_id)
    origin = "measured" if facts["costs_are_measured"] else "predicted from tokens, not measured"
    click.echo(f"\nBuckets that share steps, their costs within 10 % ({origin}):")
    for number, names in members.items():
        click.echo(f"  {number}: {', '.join(names)}")


def _print_tails(facts: Mapping[str, Any]) -> None:
    click.echo("\nAll tails, side by side:")
    rows = [
        (
            row["tail"] + (" *" if row["tail"] == facts["tail"] else ""), row["steps"], row["num_delivered"],
            f"{row['share_left_out']:.2%}", f"{row['share_repeated']:.2%}", row["starved_buckets"],
        )
        for row in facts["tails"]
    ]  # fmt: skip
    click.echo(table(["tail", "steps", "delivered", "left out", "repeated", "starved buckets"], rows))


def _print_waste(buckets: Mapping[str, Mapping[str, Any]], *, is_metadata: bool) -> None:
    click.echo("\nWhat a bucket's shape costs:")
    headers = ["bucket", "cropped", "most", "scaled by", "frames unused"]
    headers.append("expected" if is_metadata else "clip")
    rows = [
        (
            name, _share(row["crop_mean"]), _share(row["crop_max"]), _factor(row["upscale_mean"]),
            _share(row["frames_unused_share"]),
            f"{row['expected']:.1f}" if is_metadata else size(row["clip_bytes_mean"]),
        )
        for name, row in buckets.items()
    ]  # fmt: skip
    click.echo(table(headers, rows))


def _share(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.1%}"


def _factor(value: float | None) -> str:
    return "not recorded" if value is None else f"{value:.2f}"


def _print_left_out(found: Mapping[str, Any]) -> None:
    total = sum(kind["rows"] for kind in found["left_out"])
    click.echo(f"\n{found['rows']} rows, {found['rows'] - total} with a bucket, {total} without:")
    for kind in found["left_out"]:
        click.echo(f"  {kind['kind']}: {kind['rows']} rows (expected {kind['expected']:.1f})")
        for example in kind["examples"]:
            name = f" {example['source']}" if example["source"] else ""
            click.echo(printable(f"    row {example['row']}{name}: {example['reason']}"))


def _print_loads(facts: Mapping[str, Any]) -> None:
    details = facts["details"]
    tokens, mark = details["tokens_per_rank_and_step"], "~" if details["is_estimate"] else ""
    click.echo(
        f"\ntokens a rank and step: {mark}{tokens['mean']:.0f} on the mean, {tokens['min']} to {tokens['max']}; the "
        f"busiest rank has {mark}{details['imbalance_tokens']:.3f} times the mean one's "
        f"(by predicted cost {mark}{details['imbalance_costs']:.3f})"
    )
    by_rank = details["member_bytes_by_rank"]
    if by_rank is not None:
        mark = "~" if details["member_bytes_are_estimate"] else ""
        click.echo(f"bytes of clips a rank and epoch: {mark}{_ranks(by_rank)}")
    _print_memory(details["memory"])
    if details["estimates"] is not None:
        _print_estimates(details["estimates"])


def _ranks(by_rank: Sequence[int]) -> str:
    if len(by_rank) <= _MAX_RANKS_SHOWN:
        return ", ".join(size(each) for each in by_rank)
    return f"{size(min(by_rank))} to {size(max(by_rank))}"


def _print_memory(memory: Mapping[str, Any]) -> None:
    halves = "" if memory["ring_bytes_yuv420p"] is None else f" (yuv420p {size(memory['ring_bytes_yuv420p'])})"
    click.echo(
        f"host memory a rank: ring {size(memory['ring_bytes'])}{halves}, workers ~{size(memory['workers_bytes'])}; "
        f"{memory['ranks_per_node']} ranks of a machine ~{size(memory['per_node_bytes'])}"
    )


def _print_estimates(estimates: Mapping[str, Any]) -> None:
    epoch, num_bytes = estimates["epoch"], size(estimates["bytes_read_busiest_rank"])
    parts = ", ".join(
        f"{name} {'not measured' if seconds is None else _duration(seconds)}"
        for name, seconds in epoch["parts"].items()
    )
    click.echo("estimates (--cost-table says what yours gives):")
    click.echo(
        f"  requests of an object store, busiest rank: ~{estimates['requests_busiest_rank']:.0f} "
        f"(~{estimates['requests_a_sample']:.2f} a sample for clips), ~{num_bytes} read"
    )
    click.echo(f"  an epoch: ~{_duration(epoch['seconds'])}, bound by {epoch['bound_by']} ({parts})")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
