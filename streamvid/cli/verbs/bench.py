"""streamvid bench: measure how many samples per second this machine and store deliver, and what limits them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from streamvid.bench.options import BenchOptions
from streamvid.cli.console import print_table, run_and_print, size
from streamvid.cli.flags import LOCATION, GroupedCommand, option_flags
from streamvid.cli.shared_flags import storage_flags
from streamvid.cli.verbs.plan import parse_sizes
from streamvid.errors import LoaderError, printable

if TYPE_CHECKING:
    from streamvid.bench.bench import BenchReport
    from streamvid.bench.verdict import LoaderRun, Need, StoreRun
    from streamvid.storage import StorageOptions

_EXAMPLES = """\b
Examples:
  streamvid bench ds/ --batch-size 4
  streamvid bench ds/ --max-tokens-per-batch 60000 --step-seconds 0.8 --local-ranks 8
  streamvid bench ds/ --num-workers 4,8,16 --device cuda --seconds 20
  streamvid bench ds/ --json | jq .verdict

\b
Caches are not dropped. The first pass over the store represents a first epoch only if the kernel
reports that the data came from a disk. All other figures are for warm caches. Nothing is written.

\b
Exit codes: 0 measured (and --step-seconds, if given, can be met), 1 --step-seconds cannot be met or
the dataset cannot be read, 2 incorrect usage."""


@click.command(cls=GroupedCommand, epilog=_EXAMPLES)
@click.argument("dataset", type=LOCATION)
@click.option(
    "--batch-size",
    "sizes",
    multiple=True,
    metavar="N|BUCKET=N",
    help="Samples per rank per step, as in `streamvid plan`.  [default: 4]",
)
@option_flags(BenchOptions, "options", exclude={"batch_size"})
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(
    dataset: str, sizes: tuple[str, ...], as_json: bool, storage: StorageOptions, options: BenchOptions
) -> None:
    """Measure how many samples per second the loader delivers on this machine, and find the bottleneck.

    First, only reads from the store are measured. Then a loader runs once for each number of workers.
    """
    from streamvid.bench.bench import bench
    from streamvid.dataset.versions.open import open_dataset

    if sizes:
        options = replace(options, batch_size=parse_sizes(sizes))
    opened = open_dataset(dataset, storage=storage)
    report = run_and_print(lambda progress: bench(opened, options, progress), as_json, _print)
    need = report.need
    if need is not None and need.obstacles:
        raise LoaderError(
            f"this machine and store cannot deliver data fast enough for steps of {need.step_seconds:g} s: "
            f"{'; '.join(need.obstacles)}. They can feed steps of {need.fastest_step_seconds:.3g} s or longer. To "
            f"increase the speed: {'; '.join(report.verdict.advice)}"
        )


def _print(report: BenchReport) -> None:
    setting = report.setting
    pixels = setting.pixels if setting.pixels == "yuv420p" else f"{setting.pixels}, {setting.accuracy}"
    click.echo(
        printable(
            f"{report.dataset}: {report.num_samples} samples in split {report.split}; clips: {setting.clips}; "
            f"pixels: {pixels}; {setting.num_cores} core(s)"
        )
    )
    click.echo("\nThe store alone (ranges are read and their checksums verified, but nothing is decoded):")
    headers = ["pass", "samples", "samples/s", "MB/s", "read/sample", "share of clips", "from a disk"]
    print_table(headers, [_store_row(*one) for one in zip(("first", "second"), report.store, strict=True)])
    click.echo("\nThe loader (its batches are discarded):")
    headers = ["workers", "first batch", "samples/s", "batches/s", "decoders busy", "CPU/sample", "main CPU/batch"]
    print_table(headers, [_run_row(run) for run in report.runs])
    click.echo("\nDecoding alone (time that one decoder needs per sample):")
    _print_buckets(report)
    _print_verdict(report)
    if report.need is not None:
        _print_need(report.need)


def _store_row(name: str, run: StoreRun) -> tuple[object, ...]:
    of_stored = f"{run.num_bytes / max(1, run.num_stored_bytes):.0%}"
    disk = "unknown" if run.num_disk_bytes is None else f"{min(1.0, run.num_disk_bytes / max(1, run.num_bytes)):.0%}"
    mean = size(run.num_bytes // max(1, run.num_samples))
    rates = f"{run.samples_per_second:.1f}", f"{run.bytes_per_second / 1e6:.1f}"
    return (name, run.num_samples, *rates, mean, of_stored, disk)


def _run_row(run: LoaderRun) -> tuple[object, ...]:
    cpu = run.worker_cpu_seconds
    return (
        run.num_workers,
        f"{run.first_batch_seconds:.2f} s",
        f"{run.samples_per_second:.1f}",
        f"{run.num_steps / run.seconds:.2f}",
        f"{run.decoders_busy:.0%}",
        "-" if cpu is None else f"{cpu / run.num_samples * 1000:.1f} ms",
        "-" if run.main_cpu_per_step is None else f"{run.main_cpu_per_step * 1000:.2f} ms",
    )


def _print_buckets(report: BenchReport) -> None:
    # The times come from the run with the fewest workers, because these workers wait least for a core.
    run = min(report.runs, key=lambda run: run.num_workers)
    rows = [
        (
            one.bucket_id,
            report.batch_sizes[one.bucket_id],
            one.num_samples,
            f"{one.decode_seconds / one.num_samples:.4f} s",
        )
        for one in run.buckets
    ]
    print_table(["bucket", "batch", "samples", "per sample"], rows)


def _print_verdict(report: BenchReport) -> None:
    from streamvid.loader.verdict import LIMITS

    verdict = report.verdict
    click.echo(f"\nlimit: {LIMITS[verdict.limit]}")
    for reason in verdict.reasons:
        click.echo(f"  {reason}")
    for number, advice in enumerate(verdict.advice):
        click.echo(f"{'to go faster: ' if number == 0 else '        then: '}{advice}")
    for warning in report.warnings:
        click.echo(printable(f"warning: {warning}"))


def _print_need(need: Need) -> None:
    whose = f"each of {need.num_local_ranks} ranks needs" if need.num_local_ranks > 1 else "a rank needs"
    click.echo(
        f"\na step of {need.step_seconds:g} s: {whose} {need.num_workers} worker(s), with {need.margin:.0%} in reserve"
    )
    click.echo(f"  {need.samples_per_second:.1f} samples/s and {need.num_cores:.1f} cores in total")
    if need.heaviest_workers > need.num_workers:
        click.echo(f"  for many steps of {need.heaviest_bucket} in a row: {need.heaviest_workers} worker(s)")
    if need.unmeasured:
        click.echo(f"  buckets not counted, because none of their samples was measured: {', '.join(need.unmeasured)}")
    click.echo(f"  this machine and store can feed steps of {need.fastest_step_seconds:.3g} s or longer")
