"""streamvid presets: the shipped bucket configurations, their sources, and the cost of each bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_json, print_table, size

if TYPE_CHECKING:
    from streamvid.buckets.config import BucketConfig
    from streamvid.buckets.presets import BucketCost

_MANY = 40


@click.group(invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the bucket configurations of known models. `presets show NAME` shows one preset with its sources.

    \b
    streamvid shard videos/ ds/ --preset wan2.1-480p
    streamvid presets show wan2.1-480p --max-tokens-per-batch 70000
    """
    if ctx.invoked_subcommand is not None:
        return
    from streamvid.buckets.presets import load_preset, preset_names

    configs = [load_preset(name) for name in preset_names()]
    if as_json:
        print_json([_summary(config) for config in configs])
        return
    rows = [list(_summary(config).values()) for config in configs]
    print_table(["preset", "sizes", "frames", "fps", "rule", "tokens of the largest", "MB per sample"], rows)
    click.echo("\nMB: decoded frames in host memory, uint8 RGB. `streamvid presets show NAME` shows the sources.")


@command.command()
@click.argument("name")
@click.option(
    "--max-tokens-per-batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Show the batch sizes that fit in this number of tokens.",
)
@click.option("--all", "every", is_flag=True, help="Show all buckets, even if there are many.")
@click.option(
    "--yaml",
    "as_yaml",
    is_flag=True,
    help="Print only the YAML text, which can be edited and passed to --bucket-config.",
)
@click.option("--json", "as_json", is_flag=True, help="Print fields and buckets as JSON.")
def show(name: str, max_tokens_per_batch: int | None, every: bool, as_yaml: bool, as_json: bool) -> None:
    """Show the YAML text of NAME (a preset or a file), then the tokens and host memory per bucket."""
    from streamvid.buckets.document import bucket_config_to_json
    from streamvid.buckets.presets import bucket_costs, load_preset, preset_text

    config = load_preset(name)
    costs = bucket_costs(config, max_tokens_per_batch)
    if as_json:
        print_json({**bucket_config_to_json(config), "costs": [_cost_json(cost) for cost in costs]})
        return
    click.echo(preset_text(name), nl=not as_yaml)
    if as_yaml:
        return
    _print_costs(costs, every)


def _summary(config: BucketConfig) -> dict[str, object]:
    from streamvid.buckets import presets

    largest = presets.largest_tokens(config)
    return {
        "name": config.about.name,
        "sizes": presets.sizes_text(config),
        "frames": presets.frames_text(config),
        "fps": presets.rate_text(config),
        "rule": presets.rule_text(config),
        "tokens": largest.tokens,
        "sample_mb": round(largest.sample_bytes / 10**6),
    }


def _cost_json(cost: BucketCost) -> dict[str, object]:
    return {
        "bucket": cost.bucket.id,
        "shape": list(cost.bucket.shape),
        "tokens": cost.tokens,
        "sample_bytes": cost.sample_bytes,
        "batch_size": cost.batch_size,
        "batch_bytes": cost.batch_bytes,
        "own_choice": cost.is_own_choice,
    }


def _print_costs(costs: tuple[BucketCost, ...], every: bool) -> None:
    shown = costs if every or len(costs) <= _MANY else _largest_of_each_count(costs)
    rows = [
        [
            cost.bucket.id,
            cost.bucket.size_at_frames,
            cost.tokens,
            size(cost.sample_bytes),
            "-" if cost.batch_size is None else cost.batch_size,
            "-" if cost.batch_bytes is None else size(cost.batch_bytes),
            "ours" if cost.is_own_choice else "",
        ]
        for cost in shown
    ]
    headers = ["bucket", "size", "tokens", "host bytes per sample", "batch size", "host bytes per batch", "choice"]
    print_table(headers, rows, max_rows=len(rows))
    if len(shown) < len(costs):
        click.echo(
            f"\n{len(costs)} buckets; for each resolution and frame count, the table shows the bucket with the most "
            "tokens. --all shows all buckets."
        )


def _largest_of_each_count(costs: tuple[BucketCost, ...]) -> tuple[BucketCost, ...]:
    largest: dict[tuple[str | None, int], BucketCost] = {}
    for cost in costs:
        group = (cost.bucket.resolution, cost.bucket.num_frames)
        if group not in largest or cost.tokens > largest[group].tokens:
            largest[group] = cost
    return tuple(largest.values())
