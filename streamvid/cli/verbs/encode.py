"""streamvid encode: run the first stage of split training, which encodes features."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import click

from streamvid.cli.console import print_json, size
from streamvid.cli.flags import LOCATION, option_flags
from streamvid.cli.training import is_launched, run_encoding
from streamvid.cluster.options import ClusterOptions

if TYPE_CHECKING:
    from streamvid.trainer.config import TrainConfig

_EPILOG = """\b
Examples:
  streamvid encode --config mine.yaml --set data.features.url=features/
  streamvid encode --config mine.yaml --set data.features.num_visits=4 --dry-run
  accelerate launch --num_processes 8 -m streamvid encode --config mine.yaml
  streamvid encode --config mine.yaml --engine ray --ray-address head:6379
  streamvid encode --config mine.yaml --engine slurm --num-tasks 16 --sbatch-option=--partition=gpu
  streamvid encode --config mine.yaml --task 3/16       one of 16 independent jobs
  streamvid train --config mine.yaml --set task=sft:train          train on the features

Each sample of every split is encoded `num_visits` times. The last task to finish seals the features. If
the command is stopped or killed, run it again: it resumes and writes the same bytes as an uninterrupted
run."""

_SLURM_CPUS = 12
"""Number of CPUs per task on Slurm if data.num_workers is not set."""


@click.command(epilog=_EPILOG)
@click.option(
    "--config",
    type=LOCATION,
    metavar="FILE",
    help="YAML file that configures a run, or the name of a preset (tiny, tiny_bucket, tones).",
)
@click.option("--set", "overrides", multiple=True, metavar="A.B=C", help="Set a config option; repeatable.")
@option_flags(ClusterOptions, "cluster")
@click.option(
    "--dry-run", is_flag=True, help="Show what remains to be done, without loading a model or writing anything."
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    config: str | None, overrides: tuple[str, ...], cluster: ClusterOptions, dry_run: bool, as_json: bool
) -> int:
    """Encode the dataset of a run with the run's model, and store the features in data.features.url."""
    from streamvid.config import load_config
    from streamvid.shipped import shipped_config
    from streamvid.trainer.config import TrainConfig

    file = None if config is None else shipped_config("train", config)
    run = load_config(TrainConfig, file, (*overrides, "task=sft:data_process"))
    if dry_run:
        _survey(run).print(as_json)
        return 0
    if is_launched() and not cluster.is_local:
        raise click.UsageError(
            "--task and --engine cannot be used in a process that a launcher started; omit them, or run the command "
            "without the launcher"
        )
    if cluster.engine == "slurm":
        return _submit(run, cluster, as_json=as_json)
    return run_encoding(run, cluster, as_json=as_json)


def _submit(run: TrainConfig, cluster: ClusterOptions, *, as_json: bool) -> int:
    """Submit one Slurm job array. The task that finishes last seals the features."""
    from streamvid.cli.slurm import submit_command
    from streamvid.cluster.slurm import SlurmJobs
    from streamvid.storage import open_store

    url = open_store(str(run.data.features.url), run.data.storage).url
    num_cpus = _SLURM_CPUS if run.data.num_workers is None else max(1, run.data.num_workers)
    jobs = SlurmJobs("encode", url, num_cpus, uses_gpu=not run.accelerate.cpu)
    return submit_command(jobs, cluster, "progress: run the same command with --dry-run", as_json=as_json)


@dataclass(frozen=True)
class EncodeSurvey:
    """Progress of an encoding run. num_bytes_expected: estimated total size, or None if no shard is finished."""

    features: str | None
    num_visits: int
    is_sealed: bool
    num_shards: int
    num_samples: int
    num_shards_done: int
    num_samples_done: int
    num_bytes_done: int
    num_bytes_expected: int | None

    def print(self, as_json: bool) -> None:
        if as_json:
            print_json(asdict(self))
            return
        visits = f", {self.num_visits} visits each" if self.num_visits > 1 else ""
        click.echo(f"{self.num_samples} samples in {self.num_shards} shards{visits} → {self.features}")
        if self.is_sealed:
            click.echo(f"sealed: {size(self.num_bytes_done)}, nothing to do")
        elif self.num_bytes_expected is not None:
            click.echo(
                f"{self.num_shards_done} shards are finished ({size(self.num_bytes_done)}); estimated total size: "
                f"{size(self.num_bytes_expected)}"
            )
        else:
            click.echo("the total size can be estimated once a shard is finished")


def _survey(config: TrainConfig) -> EncodeSurvey:
    from streamvid.dataset.sealed_json import MANIFEST
    from streamvid.modules.factory import import_object
    from streamvid.modules.weight_files import resolve
    from streamvid.storage import open_store
    from streamvid.trainer.encode import source_of

    resolve(config.model.weights)
    import_object(config.model.factory)
    shards = source_of(config).dataset.shards
    features = config.data.features
    store = open_store(str(features.url), config.data.storage)
    finished = {file.path: file.num_bytes for file in store.files("shards")}
    done = [shard for shard in shards if shard.path in finished]
    num_samples, num_done = (sum(shard.num_samples for shard in some) for some in (shards, done))
    num_bytes = sum(finished.values())
    return EncodeSurvey(
        features=features.url,
        num_visits=features.num_visits,
        is_sealed=store.size(MANIFEST) is not None,
        num_shards=len(shards),
        num_samples=num_samples,
        num_shards_done=len(done),
        num_samples_done=num_done,
        num_bytes_done=num_bytes,
        num_bytes_expected=num_bytes * num_samples // num_done if num_done else None,
    )
