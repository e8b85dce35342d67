"""Program for torchrun: compare a step on all ranks with one rank, with adapters, FP8 and checkpointed blocks."""

from __future__ import annotations

import copy
import sys

import torch
from torch import distributed as dist
from torch import nn

from streamvid.modules.build import build_module
from streamvid.modules.config import ActivationCheckpointingConfig, LoraConfig, ModelConfig
from tests.modules import modules


def spread(module: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(module)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in module.dit.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def main(how: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = ModelConfig(
        lora=LoraConfig(base_model="dit", target_modules="q,v", rank=2),
        activation_checkpointing=ActivationCheckpointingConfig(blocks=("Block",)),
        factory="tests.modules.modules:build",
        trainable=("refiner", "dit.embed"),
        fp8=("dit.blocks", "autoencoder"),
        args={"dropout": 0.2},
    )
    module = build_module(model, task="sft", seed=0)
    alone = copy.deepcopy(module)
    together = spread(module, how)
    for one in (together, alone):
        torch.manual_seed(9)
        one(modules.batch()).backward()
    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    for one, other in ((one.grad, other.grad) for one, other in pairs if other.requires_grad):
        whole = one.full_tensor() if hasattr(one, "full_tensor") else one
        assert torch.allclose(whole, other, atol=1e-6)
    dist.destroy_process_group()
    print("the same gradients")


if __name__ == "__main__":
    main(sys.argv[1])
