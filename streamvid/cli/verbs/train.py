"""streamvid train: a run of the thin trainer; under `accelerate launch -m streamvid train` one of several processes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from streamvid.compat.diffsynth import FLAGS, flag_overrides, named_fields, override, train_flags

if TYPE_CHECKING:
    from streamvid.sharder.options import ShardOptions
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import TrainResult

_log = logging.getLogger(__name__)

_EPILOG = """\b
Examples:
  streamvid train --config tiny --set dataset=ds/ --set output=run/
  streamvid train --init my_project/              a module of your own, and how to train it
  streamvid train --config my_project/config.yaml --set max_steps=2000 --set optimizer.lr=3e-4
  streamvid train --factory my_pkg.train:build --dataset_base_path videos/ \\
      --dataset_metadata_path videos/metadata.csv --max_pixels 399360 --num_frames 49 \\
      --lora_base_model dit --lora_target_modules q,k,v,o --lora_rank 32 --output_path run/
  accelerate launch --config_file configs/accelerate/ddp_8gpu.yaml -m streamvid train --config …

Said twice, --set goes before flags, and flags before the file. Without --config, what flags leave
open is as DiffSynth-Studio has it. Started again with the same output, a run goes on from its
newest checkpoint."""


class _Command(click.Command):
    """Its help has the flags in groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        group_of = {flag.name: flag.group for flag in FLAGS}
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                title = f"{group_of[param.name]} (as DiffSynth-Studio)" if param.name in group_of else "Options"
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


@click.command(cls=_Command, epilog=_EPILOG)
@click.option("--config", type=click.Path(), metavar="FILE", help="YAML of a run, or a preset: tiny, tiny_bucket.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set a field of the config; repeatable.")
@click.option("--factory", metavar="PKG.MOD:NAME", help="What builds the training module: model.factory.")
@click.option("--tracker", "trackers", multiple=True, metavar="NAME", help="tensorboard, wandb, …; repeatable.")
@click.option("--init", "init", type=click.Path(), metavar="FOLDER", help="Write a project to start from there.")
@train_flags
def command(
    config: str | None, overrides: tuple[str, ...], factory: str | None, trackers: tuple[str, ...], init: str | None,
    **flags: Any,
) -> int:  # fmt: skip
    """Train a model on a dataset: what a config says, or DiffSynth-Studio's flags, or both."""
    if init is not None:
        from streamvid.cli.train_init import init_project

        return init_project(Path(init))
    if config is None and not overrides and not any(value is not None for value in (factory, *flags.values())):
        raise click.UsageError("nothing says what to train: give --config FILE, --dataset_base_path, or --init FOLDER")
    is_main = os.environ.get("RANK", "0") == "0"
    for name in ("streamvid.trainer", "streamvid.modules"):
        logging.getLogger(name).setLevel(logging.INFO if is_main else logging.WARNING)
    return _run(resolved_config(config, overrides, factory, trackers, flags), is_main=is_main)


def resolved_config(
    config: str | None, overrides: Sequence[str], factory: str | None, trackers: Sequence[str], flags: dict[str, Any]
) -> TrainConfig:
    """The run that all of this asks for; its dataset is made where flags ask for one that is not there yet.

    Every mistake that can be told without data is told first. Raises ConfigError, and what sharding raises.
    """
    from streamvid.compat.diffsynth_data import DataFlags, data_fields
    from streamvid.config import load_config, read_yaml
    from streamvid.shipped import shipped_config
    from streamvid.trainer.config import TrainConfig

    file = None if config is None else shipped_config("train", config)
    tree, in_sets = {} if file is None else read_yaml(file), frozenset(named_fields({}, overrides))
    named = frozenset(named_fields(tree, overrides))
    tasks = [text.partition("=")[2] for text in reversed(overrides) if text.partition("=")[0].strip() == "task"]
    task = next(iter([*tasks, flags["task"] or tree.get("task", "sft")]))
    lines = flag_overrides(flags, named, has_config=file is not None, task=str(task))
    lines += [override("model.factory", factory)] if factory is not None else []
    lines += [override("trackers", list(trackers))] if trackers else []
    base = flags["dataset_base_path"]
    if base is None:
        _check_alone(flags)
        return load_config(TrainConfig, file, [*lines, *overrides])
    pending = {"dataset": base} if flags["dataset_metadata_path"] else {"dataset": base, "sidecar": base}
    first = load_config(
        TrainConfig, file, [*(override(k, v) for k, v in pending.items() if k not in named), *lines, *overrides]
    )
    data = DataFlags(
        base, flags["dataset_metadata_path"], flags["dataset_repeat"], flags["data_file_keys"], flags["height"],
        flags["width"], flags["max_pixels"], flags["num_frames"], named, in_sets,
    )  # fmt: skip
    if data.metadata_path is not None:
        _check_model(first)
    found = data_fields(data, first, _shard)
    return load_config(TrainConfig, file, [*lines, *(override(k, v) for k, v in found.items()), *overrides])


def _check_model(config: TrainConfig) -> None:
    """ConfigError for weight files and a factory that are not there: sharding may take hours, and needs neither."""
    from streamvid.modules.build import import_object
    from streamvid.modules.weights import resolve

    resolve(config.model)
    import_object(config.model.factory)


def _check_alone(flags: dict[str, Any]) -> None:
    about_data = [flag.name for flag in FLAGS if not flag.field and not flag.name.startswith("use_")]
    given = [name for name in about_data if flags[name] is not None]
    if given:
        raise click.UsageError(f"--{given[0]} is about the data of --dataset_base_path, which is not given")


def _shard(source: str, options: ShardOptions) -> str:
    from streamvid.cli.console import ProgressBar, printable, size
    from streamvid.compat.dataset_cache import cached_dataset

    progress = ProgressBar()
    try:
        folder, report = cached_dataset(source, options, progress, lambda text: click.echo(printable(text), err=True))
    finally:
        progress.close()
    if report is not None:
        click.echo(
            f"sharded {report.num_records} rows: {report.num_samples} samples in {len(report.buckets)} buckets, "
            f"{size(report.num_bytes)}, {report.num_rejected} rejected",
            err=True,
        )
        for rejection in report.rejections[:5]:
            click.echo(printable(f"rejected: row {rejection.row}  {rejection.source}: {rejection.reason}"), err=True)
        click.echo(f"kept in {folder}; all of it: streamvid stats {folder} --rejections", err=True)
    return str(folder)


def _run(config: TrainConfig, *, is_main: bool) -> int:
    from streamvid.trainer.__main__ import is_alone_by_mistake, run_to_exit_code

    if is_alone_by_mistake(os.environ):
        _log.warning(
            "this is the only process: `accelerate launch --cpu --num_processes N` starts one and no more; "
            "use `accelerate launch --config_file configs/accelerate/cpu_2ranks.yaml`"
        )
    if config.task == "sft:data_process":
        from streamvid.compat.diffsynth_data import note_dataset

        code = run_to_exit_code(config)
        if code == 0 and is_main:  # sealed: all ranks wait for that
            note_dataset(config)
            click.echo(f"encoded: {config.sidecar}\nnext: --task sft:train --dataset_base_path {config.sidecar}")
        return code
    if "RANK" in os.environ:
        return run_to_exit_code(config)
    from streamvid.trainer.trainer import train

    return print_result(train(config))


def print_result(result: TrainResult) -> int:
    """Where the run ended; the exit code that says whether it is complete."""
    if result.stopped_by is not None:
        click.echo(
            f"stopped by {result.stopped_by.name} after step {result.step} of {result.num_steps}; checkpoint saved"
        )
        click.echo("the same command goes on from there")
        return 128 + result.stopped_by
    loss = "-" if result.loss is None else f"{result.loss:.4f}"
    held_out = "-" if result.eval_loss is None else f"{result.eval_loss:.4f}"
    click.echo(f"step {result.step}: loss {loss}, evaluation loss {held_out}, {result.num_samples} samples")
    click.echo(f"weights, state and metrics.jsonl: {result.output}")
    return 0
