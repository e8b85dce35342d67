"""streamvid stats: show the contents of a dataset, or the details of single samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_json, print_table, size
from streamvid.cli.flags import LOCATION, GroupedCommand
from streamvid.cli.report import MAX_REJECTIONS, print_kinds, stored_line
from streamvid.cli.shared_flags import storage_flags
from streamvid.errors import printable

if TYPE_CHECKING:
    from streamvid.dataset.manifest import NativeClips
    from streamvid.dataset.reader import Dataset
    from streamvid.forecast.contents import DatasetContents, RejectedRow
    from streamvid.forecast.histograms import Histograms
    from streamvid.storage import StorageOptions

_BARS = " ▁▂▃▄▅▆▇█"


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  streamvid stats ds/\n  streamvid stats s3://bucket/ds\n"
    "  streamvid stats ds/ --rejections\n"
    "  streamvid stats ds/ --histograms\n"
    "  streamvid stats ds/ --samples KEY KEY\n"
    "  streamvid stats ds/ --json | jq .buckets",
)
@click.argument("dataset", type=LOCATION)
@click.argument("keys", nargs=-1)
@click.option("--rejections", is_flag=True, help="Show rejections by kind, with remedies.")
@click.option("--histograms", is_flag=True, help="Show the distributions of durations, sizes, captions and columns.")
@click.option("--samples", is_flag=True, help="Show all details of the samples with these KEYS.")
@click.option("--json", "as_json", is_flag=True, help="Print the statistics as JSON.")
@storage_flags
def command(
    dataset: str,
    keys: tuple[str, ...],
    rejections: bool,
    histograms: bool,
    samples: bool,
    as_json: bool,
    storage: StorageOptions,
) -> None:
    """Show the contents of a dataset: buckets, splits, columns, and rejected rows with the reason for each.

    With --samples KEYS, show individual samples: where each is stored, its caption, and all of its columns.
    """
    from streamvid.dataset.versions.open import open_dataset
    from streamvid.forecast.contents import contents_of
    from streamvid.forecast.histograms import histograms_of

    if bool(keys) != samples or rejections + histograms + samples > 1:
        raise click.UsageError(
            "pass --samples and KEYS together, as in `streamvid stats DATASET --samples KEY`; --samples, --rejections "
            "and --histograms cannot be combined"
        )
    opened = open_dataset(dataset, storage=storage)
    if samples:
        _print_samples(opened, keys, as_json)
    elif histograms:
        _print_histograms(histograms_of(opened), opened, as_json)
    elif rejections:
        _print_rejections(contents_of(opened), as_json)
    elif as_json:
        print_json(contents_of(opened).to_json())
    else:
        _print_contents(contents_of(opened))


def _print_contents(contents: DatasetContents) -> None:
    from streamvid.dataset.manifest import FORMAT_VERSION

    headers = ["bucket", "T x H x W", "split", "samples", "shards", "size"]
    rows = [
        (
            one.bucket_id,
            " x ".join(map(str, one.shape)),
            one.split,
            one.num_samples,
            one.num_shards,
            size(one.num_bytes),
        )
        for one in contents.buckets
    ]
    print_table(headers, rows)
    click.echo(
        f"\n{contents.num_samples} samples in {contents.num_shards} shards, {size(contents.num_bytes)}; "
        f"clips: {contents.clips}; format {FORMAT_VERSION}, version {contents.version}"
    )
    if contents.where is not None:
        click.echo(printable(f"only samples of the view: {contents.where}; sizes are for whole shards"))
    if contents.native is not None:
        _print_encoding(contents.native)
    if contents.with_audio is not None:
        click.echo(f"with audio: {contents.with_audio} of {contents.num_samples} samples")
    click.echo(printable(f"columns: {', '.join(contents.columns) or 'none'}"))
    for group in contents.annotations:
        click.echo(printable(f"added by annotate: {', '.join(group.columns)} ({size(group.num_bytes)})"))
    if contents.stored_clips[0]:
        click.echo(stored_line(contents.stored_clips))
    # Samples may have been removed from a later version, so samples and rejections no longer add up.
    is_cut = contents.version == 1 and contents.num_windows != contents.num_records
    cut = f"{contents.num_windows} windows of " if is_cut else ""
    click.echo(f"rejected: {len(contents.rejections)} of {cut}{contents.num_records} input rows")
    _print_first_rejections(contents.rejections)


def _print_encoding(native: NativeClips) -> None:
    encoding, psnr_y = native.encoding, native.quality["psnr_y"]
    crf = "" if encoding["crf"] is None else f" crf {encoding['crf']}"
    rate = "as in the sources" if encoding["fps"] is None else encoding["fps"]
    audio = "" if encoding["audio"] is None else f", audio {encoding['audio']}"
    click.echo(
        f"encoded: {encoding['codec']}{crf}, gop {encoding['gop']}, fps {rate}{audio}; "
        f"PSNR-Y mean {psnr_y['mean']:.1f}, 5th percentile {psnr_y['p5']:.1f}, lowest {psnr_y['min']:.1f} dB"
    )


def _print_first_rejections(rejections: Sequence[RejectedRow]) -> None:
    for one in rejections[:MAX_REJECTIONS]:
        click.echo(printable(f"  row {one.row}  {one.source}: {one.reason}"))
    if len(rejections) > MAX_REJECTIONS:
        more = len(rejections) - MAX_REJECTIONS
        click.echo(f"  and {more} more; --rejections shows them by kind with remedies, --json lists all")


def _print_rejections(contents: DatasetContents, as_json: bool) -> None:
    kinds, total = contents.rejected_by_kind, len(contents.rejections)
    if as_json:
        values = [kind.to_json() for kind in kinds]
        print_json({"dataset": contents.url, "rejections": total, "rejected_by_kind": values})
        return
    if kinds:
        print_kinds(kinds, with_examples=True)
        click.echo("")
    click.echo(f"rejected: {total} of {contents.num_records} input rows")


def _print_histograms(found: Histograms, dataset: Dataset, as_json: bool) -> None:
    if as_json:
        print_json({"dataset": dataset.url, "where": dataset.where, "histograms": found.to_json()})
        return
    rows = [
        (one.label, one.num_missing, *map(_number, (one.minimum, one.median, one.mean, one.maximum)), _bars(one.counts))
        for one in found.figures
    ]
    print_table(["figure", "missing", "lowest", "median", "mean", "highest", "distribution"], rows)
    read = "" if found.is_complete else f", estimated from {found.num_scanned} of them"
    click.echo(f"\n{found.num_samples} samples, {found.hours:.2f} hours{read}")
    if dataset.where is not None:
        click.echo(printable(f"only samples of the view: {dataset.where}"))


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"


def _bars(counts: Sequence[int]) -> str:
    most = max(counts, default=0)
    return "".join(_BARS[-(-count * (len(_BARS) - 1) // most)] for count in counts)


def _print_samples(dataset: Dataset, keys: Sequence[str], as_json: bool) -> None:
    from streamvid.preview.find import find_keys
    from streamvid.preview.sample import sample_facts

    found = [sample_facts(dataset, place) for place in find_keys(dataset, keys)]
    if as_json:
        print_json({"dataset": dataset.url, "samples": [one.to_json() for one in found]})
        return
    for number, facts in enumerate(found):
        if number:
            click.echo("")
        print_table(
            ["field", "value"], [(name, _shown(value)) for name, value in facts.to_json().items()], max_rows=1000
        )


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
