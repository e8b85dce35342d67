"""streamvid shard: a folder of videos, or a metadata file, as a sealed dataset."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import click

from streamvid.cli.bucket_flags import bucket_flags, bucket_options
from streamvid.cli.caption_flags import caption_flags, text_option
from streamvid.cli.console import ProgressBar, print_json, printable
from streamvid.cli.media_flags import media_flags, media_options
from streamvid.cli.report import print_report
from streamvid.cli.storage_flags import storage_flags

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class ByteSize(click.ParamType[int]):
    """512MB, 1GiB, 1000000: a whole number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(value))
        if match is None or match[2].upper() not in _UNITS:
            self.fail(f"{value!r} is no size; write it as 512MB, 1GiB or a number of bytes", param, ctx)
        return int(float(match[1]) * _UNITS[match[2].upper()])


class Number(click.ParamType[float]):
    """A number; whole ones as int, since some codecs take no others."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            number = float(value)
        except ValueError:
            self.fail(f"{value!r} is no number", param, ctx)
        return int(number) if number.is_integer() else number


class Rate(click.ParamType[Fraction]):
    """24, 23.976 or 30000/1001: frames a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Fraction:
        try:
            return Fraction(str(value))
        except (ValueError, ZeroDivisionError):
            self.fail(f"{value!r} is no frame rate; write it as 24 or 30000/1001", param, ctx)


_EPILOG = """\b
Examples:
  streamvid shard videos/ ds/ --dry-run
  streamvid shard videos/ ds/ --resolution 256px --num-frames 1,17,33
  streamvid shard videos/ ds/ --metadata videos/meta.csv --caption-column prompt \\
      --buckets "832x480@81,480x832@81" --val-fraction 0.01 --shard-size 512MB
  streamvid shard videos/ ds/ --clips native --resolution 480p --num-frames 17,81
  streamvid shard videos/ ds/ --preset wan2.1-480p
  streamvid shard videos/ ds/ --bucket-config opensora.yaml --assign all
  streamvid shard films/ ds/ --clips native --fps 16 --max-clip-seconds 20 --min-psnr 38
  streamvid shard old-ds/ more-ds/ ds/ --resolution 480p --num-frames 17,81
  streamvid shard s3://videos/raw s3://datasets/ds --clips native --work-dir /scratch

SOURCE is a folder (captions in a metadata.csv/.jsonl/.json/.parquet there or in its folders, in
prompt.txt beside videos.txt, or in a .txt beside each video), such a metadata file, a folder of
parquet files, one of tars (webdataset, video2dataset, cosmos-curate), or a sealed dataset, for other
buckets; several are put together. Stopped at any point, the same command goes on where it was."""


@click.command(
    epilog=_EPILOG,
    short_help="Turn a folder of videos into a sealed dataset.",
)
@click.argument("source", type=click.Path(), nargs=-1, required=True)
@click.argument("dest", type=click.Path())
@click.option(
    "--layout",
    type=click.Choice(["metadata", "folder", "lists", "imagefolder", "parquet", "tars", "dataset"]),
    help="How SOURCE is laid out.  [default: told by what is there]",
)
@click.option("--metadata", type=click.Path(), help="CSV, JSON, JSONL or Parquet with a row a video.")
@click.option("--base-path", type=click.Path(), help="What its relative paths start from.  [default: SOURCE]")
@click.option("--video-column", metavar="C", help="Its column with paths.  [default: path, video, file_name, …]")
@click.option("--where", metavar="TEXT", help="Take only rows that meet it, as 'aesthetic > 5 and fps >= 24'.")
@caption_flags
@media_flags
@bucket_flags
@click.option(
    "--clips",
    type=click.Choice(["copy", "native"]),
    default="copy",
    show_default=True,
    help="Store files as they are, or encoded at their bucket's size: much faster to read.",
)
@click.option("--codec", metavar="NAME", help="Native: h264, mjpeg, av1 or ffv1 (lossless).  [default: h264]")
@click.option("--crf", type=Number(), help="Native: quality, lower is better.  [default: 18; av1 24, mjpeg 3]")
@click.option("--gop", type=click.IntRange(min=1), metavar="N", help="Native: frames a key frame.  [default: 16]")
@click.option("--fps", type=Rate(), help="Rate at which clips are read, as 24 or 30000/1001.  [default: the source's]")
@click.option(
    "--fps-rule",
    type=click.Choice(["resample", "cap", "fix_frame_rate"]),
    help="Frames nearest in time, every n-th for a rate of --fps at most, or by number as DiffSynth does."
    "  [default: resample]",
)
@click.option("--max-clip-seconds", type=float, metavar="S", help="Native: cut longer sources into clips.")
@click.option("--min-psnr", type=float, metavar="DB", help="Native: reject clips of a lower PSNR-Y.")
@click.option(
    "--verify",
    type=click.Choice(["decode", "probe"]),
    help="Decode all frames of a source, or one.  [default: probe; native: decode]",
)
@click.option(
    "--hdr",
    type=click.Choice(["refuse", "allow"]),
    default="refuse",
    show_default=True,
    help="HDR video (PQ, HLG): refuse it, or take it as it is.",
)
@click.option(
    "--encode-timeout", type=float, metavar="S", default=14400.0, show_default=True, help="For one clip, in seconds."
)
@click.option("--max-clip-bytes", type=ByteSize(), default="2GiB", show_default=True, help="Refuse larger files.")
@click.option("--val-fraction", default=0.0, show_default=True, help="Share of videos kept for split 'val'.")
@click.option("--shard-size", type=ByteSize(), default="512MB", show_default=True, help="Bytes a tar aims at.")
@click.option("--seed", default=0, show_default=True, help="Which shuffle decides what lies beside what.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: one a core]")
@click.option("--overwrite", is_flag=True, help="Replace another dataset that is sealed at DEST.")
@click.option("--work-dir", type=click.Path(), help="Local folder of what is unfinished of a DEST in a bucket.")
@click.option("--abandon", is_flag=True, help="Remove what an unfinished run left at DEST, and build nothing.")
@click.option("--dry-run", is_flag=True, help="Show what would be built; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@storage_flags
def command(source: tuple[str, ...], dest: str, abandon: bool, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Turn a folder of videos, or a metadata file, into a sealed dataset at DEST. Both may be s3:// URLs."""
    from streamvid.sharder.sharder import dry_run as plan_only
    from streamvid.sharder.sharder import shard

    options = _options(given)
    if abandon:
        _abandon(dest, options)
        return
    progress = ProgressBar()
    try:
        report = (plan_only if dry_run else shard)(source, dest, options, progress)
    finally:
        progress.close()
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, dest)


def _abandon(dest: str, options: Any) -> None:
    from streamvid.sharder.sharder import abandon

    done = "removed what was unfinished at" if abandon(dest, options) else "nothing is unfinished at"
    click.echo(printable(f"{done} {dest}"))


def _options(given: dict[str, Any]) -> Any:
    from streamvid.sharder.options import ShardOptions

    text_option(given)
    media_options(given)
    bucket_options(given)
    given["shard_size_bytes"] = given.pop("shard_size")
    given["encode_timeout_seconds"] = given.pop("encode_timeout")
    if given["workers"] is None:
        del given["workers"]
    return ShardOptions(**given)
