"""Implementation of `streamvid train --check` and `streamvid train --profile`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from streamvid.cli.console import ProgressBar, print_table, size
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.preflight.check import CheckReport


def run_check(config: TrainConfig, device_bytes: int | None) -> int:
    """Check a run, and print the resources that it needs. Return 1 if the run does not fit in memory, otherwise 0."""
    from streamvid.trainer.preflight.check import check

    report = check(config, device_bytes)
    _print_memory(report)
    if report.step_seconds is not None and report.epoch_seconds is not None:
        click.echo(
            f"one step of {report.largest}: {report.step_seconds:.3g} s; an epoch: about "
            f"{report.epoch_seconds:,.0f} s in one process, excluding time spent waiting for data"
        )
    if report.peak_bytes is not None:
        click.echo(f"peak memory of that step: {size(report.peak_bytes)}")
    for problem in report.problems:
        click.echo(printable(f"problem: {problem}"))
    for text in report.advice:
        click.echo(printable(f"would help: {text}"))
    if not report.problems:
        click.echo("the run fits")
    return 1 if report.problems else 0


def _print_memory(report: CheckReport) -> None:
    fixed = report.fixed
    click.echo(
        f"{report.device}, {size(report.device_bytes)}: weights {size(fixed.weights)} (encoders "
        f"{size(fixed.encoders)}), gradients {size(fixed.gradients)}, optimizer {size(fixed.optimizer)}"
    )
    used = "checkpointed" if report.checkpoints_activations else "stored"
    headers = ("bucket", "batch", "tokens", "steps", "encode", "stored", "checkpointed", f"step ({used})", "seconds")
    rows = [
        (
            row.bucket_id,
            row.batch_size,
            row.tokens,
            row.num_steps,
            size(row.encode_bytes),
            size(row.activation_bytes),
            size(row.checkpointed_bytes),
            size(row.needed_bytes),
            f"~{row.seconds:.3g}",
        )
        for row in report.buckets
    ]
    print_table(headers, rows)


def run_profile(config: TrainConfig) -> int:
    """Measure the cost of each bucket in a run, and write the cost table to the run's output folder."""
    from streamvid.trainer.preflight.profile import COSTS_FILE, profile

    with ProgressBar() as progress:
        found = profile(config, progress=progress)
    path = config.output / COSTS_FILE
    found.write(path)
    print_table(
        ("bucket", "batch", "seconds"),
        [(name, batch_size, f"{seconds:.4g}") for (name, batch_size), seconds in sorted(found.seconds.items())],
    )
    click.echo(printable(f"written: {path}"))
    click.echo(
        printable(f"next: train with --set data.loader.sync=cost --set data.loader.schedule.costs={path}, or run")
    )
    click.echo(printable(f"streamvid plan {config.data.dataset} --sync cost --costs {path} …"))
    return 0
