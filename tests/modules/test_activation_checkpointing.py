"""Tests of activation checkpointing: bit-identical gradients with fewer stored activations."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamvid.errors import ConfigError
from streamvid.modules import activation_checkpointing, lora
from streamvid.modules.config import ActivationCheckpointingConfig, LoraConfig
from tests.modules import modules

Prepare = Callable[[nn.Module], object]


def gradients(prepare: Prepare, *, dtype: torch.dtype | None = None, adapters: bool = False) -> dict[str, Tensor]:
    """Return the loss and gradients of one step, dropout included, after `prepare` has changed the module."""
    torch.manual_seed(0)
    module = modules.build(dim=16, depth=3, dropout=0.3, task="sft:train")
    if adapters:
        module.requires_grad_(False)
        lora.inject(module, LoraConfig(base_model="dit", target_modules="q,v,ffn.0", rank=2))
    prepare(module)
    torch.manual_seed(1)
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        loss = module(modules.batch())
    loss.backward()
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert len(found) == sum(p.requires_grad for p in module.parameters())
    return {"loss": loss.detach(), **found}


def nothing(module: nn.Module) -> None:
    return


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wrapping(
    function: activation_checkpointing.Checkpoint | None = None, *blocks: str, offload: bool = False
) -> Prepare:
    config = ActivationCheckpointingConfig(blocks=blocks or ("Block",), offload=offload)
    return functools.partial(activation_checkpointing.wrap, config=config, function=function)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_are_the_same_bit_for_bit(offload: bool, dtype: torch.dtype | None, adapters: bool) -> None:
    """Rows 33 and 34: gradients are equal with dropout, under autocast, and behind frozen layers."""
    plain = gradients(nothing, dtype=dtype, adapters=adapters)
    assert same(gradients(wrapping(offload=offload), dtype=dtype, adapters=adapters), plain)


@pytest.mark.parametrize("adapters", [False, True])
def test_gradients_are_the_same_with_another_librarys_checkpoints(adapters: bool) -> None:
    """Row 41: gradients are equal with a reentrant function with positional arguments, like DeepSpeed's, also behind
    frozen layers, where no input requires a gradient."""
    function = functools.partial(checkpoint, use_reentrant=True)
    assert same(gradients(wrapping(function), adapters=adapters), gradients(nothing, adapters=adapters))


def kept_bytes(prepare: Prepare, batch: dict[str, Tensor]) -> int:
    """Return the bytes of the tensors that autograd stores between forward and backward, without weights."""
    torch.manual_seed(0)
    module = modules.build(dim=32, depth=6, task="sft:train")
    prepare(module)
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(batch)
    loss.backward()
    return sum(kept.values())


def test_fewer_bytes_are_stored_between_forward_and_backward() -> None:
    batch = modules.batch(size=4, length=64)
    assert kept_bytes(wrapping(), batch) * 4 < kept_bytes(nothing, batch)


def test_blocks_are_recomputed_only_during_backward() -> None:
    module = modules.build(depth=2, task="sft:train")
    activation_checkpointing.wrap(module, ActivationCheckpointingConfig(blocks=("dit.blocks.1",)))
    runs = {0: 0, 1: 0}
    for place, block in enumerate(module.dit.blocks):
        block.norm.register_forward_hook(lambda *_, place=place: runs.__setitem__(place, runs[place] + 1))
    with torch.no_grad():
        module(modules.batch())
    assert runs == {0: 2, 1: 2}
    module(modules.batch()).backward()
    assert runs == {0: 4, 1: 6}


@pytest.mark.parametrize(
    ("blocks", "wrapped"),
    [
        (("Block",), ["dit.blocks.0", "dit.blocks.1"]),
        (("dit.blocks",), ["dit.blocks.0", "dit.blocks.1"]),
        (("dit.blocks.*",), ["dit.blocks.0", "dit.blocks.1"]),
        (("*.*.1",), ["dit.blocks.1"]),
        (("Attention", "dit.blocks.0"), ["dit.blocks.1.attention", "dit.blocks.0"]),
        (("refiner", "Denoiser"), ["refiner", "dit"]),
        (("auto",), ["dit.blocks.0", "dit.blocks.1"]),
    ],
)
def test_blocks_are_named_by_class_or_by_name_and_the_outermost_counts(
    blocks: tuple[str, ...], wrapped: list[str]
) -> None:
    module = modules.build(task="sft:train")
    names = list(module.state_dict())
    assert list(activation_checkpointing.wrap(module, ActivationCheckpointingConfig(blocks=blocks))) == wrapped
    assert list(module.state_dict()) == names
    module(modules.batch()).backward()


def test_an_unknown_block_is_refused_with_the_available_ones() -> None:
    said = (
        r"blocks contains 'DiTBlock', .*allowed: class names, such as Block \(2\), "
        r"or dotted names, such as dit.blocks.\*"
    )
    with pytest.raises(ConfigError, match=said):
        activation_checkpointing.wrap(modules.build(), ActivationCheckpointingConfig(blocks=("Block", "DiTBlock")))
    with pytest.raises(ConfigError, match="no ModuleList in this module has more than one element"):
        activation_checkpointing.wrap(
            nn.Sequential(nn.Linear(1, 1)), ActivationCheckpointingConfig(blocks=("DiTBlock",))
        )
    with pytest.raises(ConfigError, match="blocks contains 'auto', which matches no block"):
        activation_checkpointing.wrap(nn.Sequential(nn.Linear(1, 1)), ActivationCheckpointingConfig(blocks=("auto",)))


def test_offload_by_another_library_is_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_checkpointing"):
        activation_checkpointing.wrap(
            modules.build(), ActivationCheckpointingConfig(blocks=("Block",), offload=True), checkpoint
        )


def test_a_wrapped_block_keeps_its_class_for_policies_and_its_copies_run_themselves() -> None:
    module = modules.build(task="sft:train")
    activation_checkpointing.wrap(module, ActivationCheckpointingConfig(blocks=("Block",)))
    block = module.dit.blocks[0]
    assert isinstance(block, modules.Block)
    assert type(block).__name__ == "Block"
    assert type(block) is type(module.dit.blocks[1])
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert twin(modules.batch()).item() != module(modules.batch()).item()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_gradients_on_a_gpu_are_equal_with_less_memory() -> None:
    """Row 34: checkpointing lowers peak memory, and offloading lowers it further."""
    peaks, found = [], []
    for prepare in (nothing, wrapping(), wrapping(offload=True)):
        torch.manual_seed(0)
        module = modules.build(dim=256, depth=8, dropout=0.3, task="sft:train").cuda()
        prepare(module)
        # The activations are large compared with the gradients, which offloading does not affect.
        batch = {name: tensor.cuda() for name, tensor in modules.batch(size=256, length=64).items()}
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(1)
        module(batch).backward()
        peaks.append(torch.cuda.max_memory_allocated())
        found.append({name: p.grad.cpu() for name, p in module.named_parameters() if p.grad is not None})
        del module, batch
    for other in found[1:]:
        for name, grad in found[0].items():
            assert torch.allclose(other[name], grad, rtol=1e-4, atol=1e-6), name
    assert peaks[2] < peaks[1] < peaks[0]
