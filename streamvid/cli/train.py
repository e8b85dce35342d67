"""streamvid train: the small model, in this process; `accelerate launch -m streamvid.trainer` takes several."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from streamvid.trainer.trainer import TrainResult

_EPILOG = """\b
Examples:
  streamvid train --config tiny --set dataset=ds/ --set output=run/
  streamvid train --config mine.yaml --set num_steps=2000 --set optimizer.lr=3e-4
  accelerate launch -m streamvid.trainer --config tiny --set dataset=ds/ --set output=run/

Started again with the same output, it goes on from the newest checkpoint there."""


@click.command(epilog=_EPILOG)
@click.option(
    "--config",
    required=True,
    type=click.Path(),
    metavar="FILE",
    help="YAML of a training run, or a preset: tiny, tiny_bucket.",
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Override a field of the config; repeatable.")
def command(config: str, overrides: tuple[str, ...]) -> int:
    """Train the small default model on a dataset."""
    from streamvid.config import load_config
    from streamvid.shipped import shipped_config
    from streamvid.trainer.config import TrainConfig
    from streamvid.trainer.trainer import train

    logging.getLogger("streamvid.trainer").setLevel(logging.INFO)
    return print_result(train(load_config(TrainConfig, shipped_config("train", config), overrides)))


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
