"""Tests that configs/accelerate and configs/slurm are accepted by their tools and consistent with the trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from accelerate import DeepSpeedPlugin
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from streamvid.recipes.small.transformer import TransformerBlock
from streamvid.shipped import shipped

FOLDER = shipped("configs/accelerate")
SETUPS = sorted(FOLDER.glob("*.yaml"))
JSONS = sorted(FOLDER.glob("*.json"))
# Filled by accelerate and streamvid.trainer.launch; accelerate takes any other "auto" from a transformers model.
FILLED = {
    "gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu",
    "torch_autocast.enabled", "torch_autocast.dtype",
}  # fmt: skip


def of(path: Path) -> Any:
    return load_config_from_file(str(path))


def autos(told: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in told.items():
        if isinstance(value, dict):
            found |= autos(value, f"{prefix}{name}.")
        elif value == "auto":
            found.add(prefix + name)
    return found


def test_every_documented_cluster_setup_exists() -> None:
    wanted = {"cpu_2ranks", "single_gpu", "ddp_8gpu", "ddp_2machines", "fsdp", "zero2", "zero3", "zero3_cpu_offload"}
    assert wanted == {path.stem for path in SETUPS}
    assert {path.stem for path in JSONS} == {f"ds_{name}" for name in wanted if name.startswith("zero")}


@pytest.mark.parametrize("path", SETUPS, ids=lambda path: path.stem)
def test_accelerate_reads_each_and_its_launcher_knows_every_key(path: Path) -> None:
    told = of(path).to_dict()
    flags = {action.dest for action in launch_command_parser()._actions}
    assert set(told.get("fsdp_config") or {}) | set(told.get("deepspeed_config") or {}) <= flags
    assert told["num_processes"] >= told["num_machines"] >= 1


@pytest.mark.parametrize("path", SETUPS, ids=lambda path: path.stem)
def test_the_first_line_is_the_command_that_uses_it(path: Path) -> None:
    first = path.read_text().split("compute_environment")[0]
    assert f"accelerate launch --config_file configs/accelerate/{path.name}" in first
    assert "-m streamvid train --config FILE" in first


@pytest.mark.parametrize("path", [path for path in SETUPS if path.stem.startswith("zero")], ids=lambda path: path.stem)
def test_a_deepspeed_setup_does_not_conflict_with_its_json(path: Path) -> None:
    told = of(path)
    assert Path(told.deepspeed_config["deepspeed_config_file"]) == Path("configs/accelerate") / f"ds_{path.stem}.json"
    assert told.mixed_precision is None
    assert set(told.deepspeed_config) == {"deepspeed_config_file", "zero3_init_flag"}


@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_each_json_is_a_plugin_whose_autos_are_all_filled(path: Path) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=str(path), zero3_init_flag=False)
    name = path.stem.removeprefix("ds_")
    told = json.loads(path.read_text())
    assert autos(told) == FILLED
    assert plugin.zero_stage == (2 if name == "zero2" else 3)
    is_offloaded = name.endswith("offload")
    assert {plugin.offload_optimizer_device, plugin.offload_param_device} == {"cpu" if is_offloaded else "none"}
    assert plugin.zero3_save_16bit_model == (plugin.zero_stage == 3)
    assert told["activation_checkpointing"].keys() == {
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization"
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("path", JSONS, ids=lambda path: path.stem)
def test_deepspeed_takes_each_json_once_filled(path: Path) -> None:
    """DeepSpeed's own validation, which rejects unknown fields in the ZeRO section, accepts each filled-in file."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed; run `make zero`")
    from deepspeed.runtime.config import DeepSpeedConfig

    told = json.loads(path.read_text())
    told |= {"gradient_accumulation_steps": 2, "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": 3}
    told |= {"train_batch_size": 6, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    made = DeepSpeedConfig(told)
    assert made.zero_optimization_stage == (2 if path.stem == "ds_zero2" else 3)
    assert (made.gradient_accumulation_steps, made.torch_autocast_enabled, made.bfloat16_config.enabled) == (
        2,
        True,
        False,
    )


def test_fsdp_wraps_the_blocks_of_the_small_model() -> None:
    assert of(FOLDER / "fsdp.yaml").fsdp_config["fsdp_transformer_layer_cls_to_wrap"] == TransformerBlock.__name__


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """A job of two tasks on the first of two machines, with stand-in programs that record what the scripts start."""
    stand_ins = {
        "srun": """
            while [[ $1 == --* ]]; do shift; done
            for rank in 0 1; do
              SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS=2 "$@" || code=$?
            done
            exit "${code:-0}" """,
        "scontrol": 'if [ "$1" = show ]; then echo first; echo second; else echo "$@" >> requeued; fi',
        "python": 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR $*" >> started; exit "$EXITS"',
    }
    for name, text in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "machine-[1-2]",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_ID": "77",
    }


@pytest.mark.parametrize("exits", [0, 1, 138, 143])
def test_a_job_is_requeued_only_if_its_time_limit_stopped_it(
    tmp_path: Path, cluster: dict[str, str], exits: int
) -> None:
    """STOP-1: exit code 138, which follows Slurm's SIGUSR1, requeues the job; other failures do not."""
    script = shipped("configs/slurm/train.sbatch")
    command = ["bash", str(script), "--config", "my run.yaml"]
    done = subprocess.run(command, check=False, cwd=tmp_path, env=cluster | {"EXITS": str(exits)})
    assert done.returncode == exits
    started = (tmp_path / "started").read_text().splitlines()
    rest = "first -m streamvid train --config my run.yaml"
    assert started == [f"{rank}/2 {rank}/2 {rest}" for rank in (0, 1)]
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == ("requeue 77\n" if exits == 138 else "")
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --signal=USR1@120", "#SBATCH --requeue"} <= set(options)
