"""streamvid encode: split training's first stage, in this process or, launched by accelerate, in several."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import ProgressBar, print_json, size

if TYPE_CHECKING:
    from streamvid.modules.encode_dataset import EncodeResult
    from streamvid.plan.position import World
    from streamvid.trainer.config import TrainConfig

_EPILOG = """\b
Examples:
  streamvid encode --config mine.yaml --set sidecar=ds-encoded/
  streamvid encode --config mine.yaml --set num_visits=4 --dry-run
  accelerate launch --num_processes 8 -m streamvid encode --config mine.yaml
  streamvid encode --config mine.yaml --part 3/16       one of 16 jobs that do not know each other
  streamvid train --config mine.yaml --set task=sft:train          reads what they wrote

All splits are encoded, each sample `num_visits` times. Stopped or killed at any point, the same
command goes on where it was, and ends with the same bytes."""


def _part(ctx: click.Context, param: click.Parameter, value: str | None) -> World | None:
    from streamvid.plan.position import World

    if value is None:
        return None
    number, _, count = value.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise click.BadParameter(f"{value!r} is no part; 1/16 is the first of 16, 16/16 the last")
    return World(int(number) - 1, int(count))


@click.command(epilog=_EPILOG, short_help="Run a model's encoders once over a dataset, into a sidecar.")
@click.option("--config", type=click.Path(), metavar="FILE", help="YAML of a training run, or a preset: tiny.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set a field of the config; repeatable.")
@click.option(
    "--part", callback=_part, metavar="I/N", help="Make this part of the shards; the last part that is done seals."
)
@click.option("--dry-run", is_flag=True, help="Say what there is to do, load no model and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(config: str | None, overrides: tuple[str, ...], part: World | None, dry_run: bool, as_json: bool) -> int:
    """Run the `encode` of a config's model over its dataset, and keep what it makes in config.sidecar."""
    from streamvid.compat.diffsynth_data import note_dataset
    from streamvid.config import load_config
    from streamvid.shipped import shipped_config
    from streamvid.trainer.config import TrainConfig

    file = None if config is None else shipped_config("train", config)
    run = load_config(TrainConfig, file, (*overrides, "task=sft:data_process"))
    if dry_run:
        _print_survey(_survey(run), as_json)
        return 0
    is_main = os.environ.get("RANK", "0") == "0"
    for name in ("streamvid.trainer", "streamvid.modules"):
        logging.getLogger(name).setLevel(logging.INFO if is_main else logging.WARNING)
    if "RANK" in os.environ:
        from streamvid.trainer.__main__ import run_to_exit_code

        if part is not None:
            raise click.UsageError("--part is for jobs that do not know each other, and a launcher started this one")
        code = run_to_exit_code(run)
        if code == 0 and is_main:
            note_dataset(run)
        return code
    from streamvid.trainer.encode import encode

    logging.getLogger("streamvid.modules.encode_dataset").setLevel(logging.WARNING)  # the bar says as much
    progress = ProgressBar()
    try:
        result = encode(run, part, progress)
    finally:
        progress.close()
    if result.is_sealed:
        note_dataset(run)
    _print(run, result, as_json)
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _survey(config: TrainConfig) -> dict[str, Any]:
    """What there is to do, and how large it becomes if the rest is as what is there."""
    from streamvid.dataset.manifest import MANIFEST
    from streamvid.modules.build import import_object
    from streamvid.modules.weights import resolve
    from streamvid.storage import open_store
    from streamvid.trainer.encode import source_of

    resolve(config.model)
    import_object(config.model.factory)
    shards = source_of(config).dataset.shards
    store = open_store(str(config.sidecar), config.storage)
    there = {file.path: file.num_bytes for file in store.files("shards")}
    done = [shard for shard in shards if shard.path in there]
    num_samples, num_done = (sum(shard.num_samples for shard in some) for some in (shards, done))
    return {
        "sidecar": config.sidecar, "num_visits": config.num_visits, "is_sealed": store.size(MANIFEST) is not None,
        "num_shards": len(shards), "num_samples": num_samples,
        "num_shards_done": len(done), "num_samples_done": num_done, "num_bytes_done": sum(there.values()),
        "num_bytes_expected": sum(there.values()) * num_samples // num_done if num_done else None,
    }  # fmt: skip


def _print_survey(survey: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(survey)
        return
    visits = f", {survey['num_visits']} visits each" if survey["num_visits"] > 1 else ""
    click.echo(f"{survey['num_samples']} samples in {survey['num_shards']} shards{visits} → {survey['sidecar']}")
    if survey["is_sealed"]:
        click.echo(f"sealed: {size(survey['num_bytes_done'])}, nothing to do")
    elif survey["num_shards_done"]:
        click.echo(
            f"{survey['num_shards_done']} shards are there, {size(survey['num_bytes_done'])}; all will be about "
            f"{size(survey['num_bytes_expected'])}"
        )
    else:
        click.echo("how large it becomes is known once a shard is there")


def _print(config: TrainConfig, result: EncodeResult, as_json: bool) -> None:
    if as_json:
        stopped = result.stopped_by and result.stopped_by.name
        print_json({"sidecar": config.sidecar, **asdict(result), "stopped_by": stopped})
        return
    bad = f"; {result.num_missing} visits of bad samples left out" if result.num_missing else ""
    click.echo(f"{result.num_samples} samples in {result.num_shards} shards encoded{bad}")
    if result.stopped_by is not None:
        click.echo(f"stopped by {result.stopped_by.name}; the same command goes on from there")
    elif result.is_sealed:
        click.echo(f"sealed: {config.sidecar}\nnext: streamvid train with task=sft:train and sidecar={config.sidecar}")
    else:
        click.echo("this part is done; others are at work, and the last one seals")
