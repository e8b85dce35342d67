"""Implementation of `streamvid train` and `streamvid encode` within one process."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import ProgressBar, print_json

if TYPE_CHECKING:
    from streamvid.cluster.options import ClusterOptions
    from streamvid.modules.encode_dataset import EncodeResult
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import TrainResult

_log = logging.getLogger(__name__)


def run_training(config: TrainConfig) -> int:
    """Train in this process, either alone or as one of several ranks.

    Return the exit code: 128 plus the number of the signal that stopped the run, or 0 if no signal stopped it.
    """
    from streamvid.trainer.launch import end_processes
    from streamvid.trainer.trainer import train

    _prepare_logs()
    result = train(config)
    if is_launched():
        end_processes()
    if is_main():
        _print_trained(result)
    return _exit_code(result)


def run_encoding(config: TrainConfig, cluster: ClusterOptions | None = None, *, as_json: bool = False) -> int:
    """Encode features in this process (alone, as one rank, or as one task) or on a Ray cluster.

    Return the exit code.
    """
    from streamvid.compat.diffsynth_data import note_dataset
    from streamvid.plan.position import World
    from streamvid.trainer.encode import encode, encode_on_ray
    from streamvid.trainer.launch import end_processes

    share = None if cluster is None or cluster.task is None else cluster.share
    part = None if share is None else World(share.number, share.num_shares)

    _prepare_logs()
    logging.getLogger("streamvid.loader").setLevel(logging.WARNING)  # the loader logs a plan for each shard
    if is_launched():
        result = encode(config, part)
        end_processes()
    else:
        logging.getLogger("streamvid.modules.encode_dataset").setLevel(logging.WARNING)  # the bar shows the progress
        with ProgressBar() as progress:
            if cluster is not None and cluster.engine == "ray":
                result = encode_on_ray(config, cluster, progress)
            else:
                result = encode(config, part, progress)
    if result.is_sealed and is_main():  # every rank has waited until the features were sealed
        note_dataset(config)
    if is_main():
        _print_encoded(config, result, as_json)
    return _exit_code(result)


def is_launched() -> bool:
    """Return True if a launcher such as `accelerate launch` or torchrun started this process as a rank."""
    return "RANK" in os.environ


def is_main() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _prepare_logs() -> None:
    from streamvid.trainer.launch import is_launched_alone

    for name in ("streamvid.trainer", "streamvid.modules"):
        logging.getLogger(name).setLevel(logging.INFO if is_main() else logging.WARNING)
    if is_launched_alone(os.environ):
        _log.warning(
            "this process is running alone, because `accelerate launch --cpu --num_processes N` starts only one "
            "process; use `accelerate launch --config_file configs/accelerate/cpu_2ranks.yaml`"
        )


def _exit_code(result: TrainResult | EncodeResult) -> int:
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def _print_trained(result: TrainResult) -> None:
    if result.stopped_by is not None:
        if result.step == 0:
            click.echo(f"stopped by {result.stopped_by.name} before the first step; run the same command again")
            return
        click.echo(
            f"stopped by {result.stopped_by.name} after step {result.step} of {result.num_steps}; checkpoint saved"
        )
        click.echo("run the same command again to resume")
        return
    if result.loss is None:
        click.echo(f"the run is already complete at step {result.step}; raise max_steps or num_epochs to train longer")
    else:
        held_out = "-" if result.eval_loss is None else f"{result.eval_loss:.4f}"
        losses = f"loss {result.loss:.4f}, evaluation loss {held_out}"
        click.echo(f"step {result.step}: {losses}, {result.num_samples} samples")
    click.echo(f"weights, state and metrics.jsonl: {result.output}")


def _print_encoded(config: TrainConfig, result: EncodeResult, as_json: bool) -> None:
    url = config.data.features.url
    if as_json:
        stopped = result.stopped_by and result.stopped_by.name
        print_json({"features": url, **vars(result), "stopped_by": stopped})
        return
    bad = f"; {result.num_missing} visits were skipped, because their samples are bad" if result.num_missing else ""
    click.echo(f"encoded {result.num_samples} samples in {result.num_shards} shards{bad}")
    if result.stopped_by is not None:
        click.echo(f"stopped by {result.stopped_by.name}; run the same command again to resume")
    elif result.is_sealed:
        click.echo(f"sealed: {url}\nnext: train on them with --set task=sft:train --set data.features.url={url}")
    else:
        click.echo("this task is complete; the last task to finish seals the features")
