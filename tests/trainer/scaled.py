"""Program of one rank of a sharded run, with the stand-in loader: `scaled.py OUTPUT MAX_STEPS [FIELD=VALUE …]`."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))

from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from streamvid.errors import StreamvidError
from streamvid.loader.world import detect_world
from streamvid.modules.optimizer import OptimizerConfig
from streamvid.trainer import train
from tests.trainer.configs import train_config
from tests.trainer.stand_in import StandInLoader, read_clip_frames

SMALL = {"dim": 24, "depth": 2, "heads": 2, "patch": [1, 4, 4]}


def let_fsdp_use_cpus() -> None:
    """Enable FSDP on CPUs: torch supports it, and accelerate refuses it only when it builds its shared state."""
    Accelerator(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin = FullyShardedDataParallelPlugin()
    if AcceleratorState().mixed_precision != "no":
        plugin.set_mixed_precision(AcceleratorState().mixed_precision)


def main() -> None:
    torch.set_num_threads(1)
    output, max_steps = Path(sys.argv[1]), int(sys.argv[2])
    fields = {name: yaml.safe_load(value) for name, value in (item.split("=", 1) for item in sys.argv[3:])}
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and "LEAVE_FSDP" not in os.environ:
        let_fsdp_use_cpus()
    world = detect_world()
    frames = read_clip_frames(12, 16, 16)
    loader = StandInLoader(frames, rank=world.rank, num_ranks=world.num_ranks)
    held_out = StandInLoader(frames, rank=world.rank, num_ranks=world.num_ranks, seed=1)
    usual = {
        "max_steps": max_steps,
        "data.accumulate": 2,
        "model.args": SMALL,
        "model.activation_checkpointing.blocks": ("TransformerBlock",),
        "optimizer": OptimizerConfig(lr=3e-3, warmup_steps=3),
        "eval.steps": 4,
        "logging.steps": 1,
        "accelerate.cpu": False,
    }
    config = train_config("in memory", output, usual | fields)
    try:
        train(config, loader, held_out)
    except StreamvidError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    finally:
        PartialState().destroy_process_group()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()
