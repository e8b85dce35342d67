"""streamvid train: train a model, in one process or in the processes that `accelerate launch` starts."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamvid.cli.console import ProgressBar, size
from streamvid.cli.flags import BYTE_SIZE, LOCATION, GroupedCommand
from streamvid.cli.preflight import run_check, run_profile
from streamvid.cli.training import run_encoding, run_training
from streamvid.compat.diffsynth import TrainRequest, add_train_flags
from streamvid.config import dump_config
from streamvid.errors import ConfigError, printable
from streamvid.shipped import shipped, shipped_config

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions
    from streamvid.sharder.report import ShardReport

_PLACES = {"dataset": "data.dataset", "output": "output"}
_PROJECT = ("training.py", "config.yaml", "README.md")
_EPILOG = """\b
Examples:
  streamvid train --recipe wan2.1 --model ./Wan2.1-T2V-1.3B-Diffusers --dataset ds/ --output run/ --lora
  streamvid train --config tiny --set data.dataset=ds/ --set output=run/
  streamvid train --init my_project/              a training module of your own
  streamvid train --config my_project/config.yaml --set max_steps=2000 --set optimizer.lr=3e-4
  streamvid train --factory my_pkg.train:build --dataset_base_path videos/ \\
      --dataset_metadata_path videos/metadata.csv --max_pixels 399360 --num_frames 49 \\
      --lora_base_model dit --lora_target_modules q,k,v,o --lora_rank 32 --output_path run/
  accelerate launch --config_file configs/accelerate/ddp_8gpu.yaml -m streamvid train --config …

--set overrides flags, and flags override the file. Without --config, DiffSynth-Studio's defaults
apply to options that no flag sets. A run that is started again with the same output resumes from
its newest checkpoint."""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.option(
    "--recipe", metavar="NAME", help=("Model family to fine-tune, such as wan2.1.  [default: detected from --model]")
)
@click.option(
    "--model", type=LOCATION, metavar="FOLDER", help="Folder with the diffusers pipeline that a recipe trains."
)
@click.option("--dataset", type=LOCATION, metavar="URL", help="Sealed dataset; sets data.dataset.")
@click.option("--output", type=LOCATION, metavar="FOLDER", help="Output folder of the run; sets output.")
@click.option("--lora", is_flag=True, default=None, help="Train adapters instead of all weights; requires a recipe.")
@click.option("--print-config", "prints", is_flag=True, default=None, help="Print the config of the run, then exit.")
@click.option(
    "--check",
    "checks",
    is_flag=True,
    default=None,
    help=("Check the dataset, memory use and one training step, then exit."),
)
@click.option("--device-memory", type=BYTE_SIZE, metavar="SIZE", help="Device memory to plan for; requires --check.")
@click.option(
    "--profile",
    "profiles",
    is_flag=True,
    default=None,
    help=("Measure the cost of each bucket and write OUTPUT/costs.json."),
)
@click.option(
    "--config",
    type=LOCATION,
    metavar="FILE",
    help="YAML file that configures a run, or the name of a preset (tiny, tiny_bucket, tones).",
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set a config option; repeatable.")
@click.option("--factory", metavar="PKG.MOD:NAME", help="Function that builds the training module; sets model.factory.")
@click.option(
    "--tracker", "trackers", multiple=True, metavar="NAME", help="Tracker, such as tensorboard or wandb; repeatable."
)
@click.option("--init", "init", type=LOCATION, metavar="FOLDER", help="Write a starter project into this folder.")
@add_train_flags
def command(
    config: str | None,
    overrides: tuple[str, ...],
    factory: str | None,
    trackers: tuple[str, ...],
    init: str | None,
    **flags: object,
) -> int:
    """Train a model on a dataset, as described by a config, DiffSynth-Studio's flags, or both."""
    if init is not None:
        return _init_project(Path(init))
    if config is None and not overrides and not any(value is not None for value in (factory, *flags.values())):
        raise click.UsageError(
            "nothing to train; pass --recipe NAME, --config FILE, --dataset_base_path FOLDER or --init FOLDER"
        )
    device_bytes: Any = flags.pop("device_memory")
    if device_bytes is not None and not flags.get("checks"):
        raise click.UsageError("--device-memory requires --check; add --check, or omit --device-memory")
    prints, checks, profiles = (flags.pop(name) for name in ("prints", "checks", "profiles"))
    run = request_of(config, overrides, factory, trackers, flags).resolve(_shard)
    if prints:
        click.echo(dump_config(run), nl=False)
        return 0
    if checks:
        return run_check(run, device_bytes)
    if profiles:
        return run_profile(run)
    return run_encoding(run) if run.task == "sft:data_process" else run_training(run)


def request_of(
    config: str | None,
    overrides: tuple[str, ...],
    factory: str | None,
    trackers: tuple[str, ...],
    flags: dict[str, object],
) -> TrainRequest:
    """Return the TrainRequest for the arguments of `streamvid train`."""
    settings: dict[str, object] = {}
    if factory is not None:
        settings["model.factory"] = factory
    if trackers:
        settings["logging.trackers"] = list(trackers)
    settings |= {option: flags[name] for name, option in _PLACES.items() if flags.get(name) is not None}
    file = None if config is None else shipped_config("train", config)
    return TrainRequest(file, overrides, settings, flags, _recipe(flags))


def _recipe(flags: Mapping[str, object]) -> Callable[[Mapping[str, str]], Mapping[str, object]] | None:
    """Return a function that computes the recipe's default options, or None if the flags select no recipe."""
    name, model = (None if flags.get(one) is None else str(flags[one]) for one in ("recipe", "model"))
    if name is None and model is None:
        if flags.get("lora"):
            raise click.UsageError(
                "--lora requires a recipe; add --model FOLDER or --recipe NAME, or use --lora_base_model CHILD"
            )
        return None
    from streamvid.trainer.recipe_config import recipe_named, recipe_options

    recipe = recipe_named(name, model)

    def options(sets: Mapping[str, str]) -> Mapping[str, object]:
        expert = sets.get("model.args.expert")
        return recipe_options(recipe, model=model, is_lora=bool(flags.get("lora")), expert=expert)

    return options


def _shard(source: str, options: ShardOptions) -> str:
    from streamvid.compat.dataset_cache import cached_dataset

    with ProgressBar() as progress:
        folder, report = cached_dataset(source, options, progress, lambda text: click.echo(printable(text), err=True))
    if report is not None:
        _print_sharded(folder, report)
    return str(folder)


def _print_sharded(folder: Path, report: ShardReport) -> None:
    click.echo(
        f"sharded {report.num_records} rows: {report.num_samples} samples in {len(report.buckets)} buckets, "
        f"{size(report.num_bytes)}, {report.num_rejected} rejected",
        err=True,
    )
    for rejection in report.rejections[:5]:
        click.echo(printable(f"rejected: row {rejection.row}  {rejection.source}: {rejection.reason}"), err=True)
    click.echo(f"cached in {folder}; for details: streamvid stats {folder} --rejections", err=True)


def _init_project(folder: Path) -> int:
    """Write the project template to `folder`. Raises ConfigError if the folder is not empty or cannot be written."""
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--init {str(folder)!r}: the folder is not empty; choose a new folder or an empty one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _PROJECT:
            shutil.copyfile(shipped(f"configs/project/{name}"), folder / name)
    except OSError as error:
        raise ConfigError(
            f"--init {str(folder)!r}: cannot write to this folder ({error.strerror}); choose another folder"
        ) from error
    click.echo(printable(f"written: {', '.join(str(folder / name) for name in _PROJECT)}"))
    click.echo(
        printable(
            f"next: cd {folder}, shard your videos as README.md describes, then run "
            "streamvid train --config config.yaml"
        )
    )
    return 0
