"""Tests of frozen weights in FP8: their error, their size, and unchanged behavior in all other respects."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules import activation_checkpointing, fp8, lora
from streamvid.modules.config import ActivationCheckpointingConfig, LoraConfig
from streamvid.modules.summary import summarize, total
from tests.modules import modules
from tests.modules.modules import differing, state_of
from tests.processes import run_command


def frozen(seed: int = 0, dim: int = 16, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return modules.build(dim=dim).requires_grad_(False).to(dtype).eval()


def output(module: nn.Module, size: int = 2) -> Tensor:
    with torch.no_grad():
        batch = modules.batch(size=size)
        return module.dit(batch["latents"], batch["times"])


def distance(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@given(
    seed=st.integers(0, 1 << 30),
    shape=st.sampled_from([(3, 7), (1, 1), (5, 2, 3), (4, 3, 1, 3, 3)]),
    exponent=st.integers(-60, 30),
    spread=st.integers(0, 12),
)
@settings(max_examples=60)
def test_every_weight_is_within_the_bound(seed: int, shape: tuple[int, ...], exponent: int, spread: int) -> None:
    """This holds for rows of any size and any dynamic range; zeros stay zeros."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * 2.0**exponent
    weight = weight * torch.exp2(-spread * torch.rand(shape, generator=generator))
    weight[torch.rand(shape, generator=generator) < 0.1] = 0
    stored, scale = fp8.quantize(weight)
    back = fp8.dequantize(stored, scale, torch.float32)
    largest = weight.abs().amax(dim=tuple(range(1, weight.dim())), keepdim=True)
    bound = torch.maximum(weight.abs() * fp8.RELATIVE_ERROR, largest * fp8.ABSOLUTE_ERROR)
    assert stored.dtype == torch.float8_e4m3fn
    assert ((back - weight).abs() <= bound).all()
    assert torch.equal(fp8.dequantize(stored, scale, torch.bfloat16).float(), back)  # exact in every dtype
    assert torch.equal(torch.exp2(scale.log2().round()), scale)


@given(place=st.integers(0, 6), value=st.sampled_from([448.0, 447.9, 256.0, 255.9, 224.0, 1.0, 2.0**-40, 0.0]))
@settings(max_examples=30)
def test_the_largest_value_of_a_row_never_overflows(place: int, value: float) -> None:
    weight = torch.full((2, 7), value / 3)
    weight[0, place] = -value
    back = fp8.dequantize(*fp8.quantize(weight), torch.float32)
    assert torch.allclose(back, weight, rtol=1 / 16, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_loss_stay_within_the_documented_bounds(dtype: torch.dtype) -> None:
    """Row 18: 3 % of a layer's output, 8 % of a model's output (norms of differences), and 0.5 % of the loss."""
    for seed in range(3):
        module, stored = frozen(seed, dim=64), frozen(seed, dim=64)
        fp8.store(stored, ["dit", "autoencoder"])
        clip, batch = modules.clip(seed, size=4), modules.batch(seed, size=8)
        hidden = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            layers = [part.dit.blocks[0].attention.q(hidden) for part in (stored, module)]
            assert 0 < distance(*layers) < 0.03
            assert 0 < distance(stored.encode(clip)["latents"], module.encode(clip)["latents"]) < 0.08
            assert 0 < distance(output(stored), output(module)) < 0.08
            assert stored(batch).item() == pytest.approx(module(batch).item(), rel=0.005)


def test_bytes_are_half_of_bfloat16() -> None:
    def linear_bytes(module: nn.Module) -> int:
        return sum(p.numel() * p.element_size() for p in module.parameters())

    half = nn.ModuleDict({"m": nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))})
    half = half.requires_grad_(False).to(torch.bfloat16)
    before, count = linear_bytes(half), total(summarize(half)).num_parameters
    assert list(fp8.store(half, ["m"])) == ["m.0", "m.1", "m.2"]
    # Half of the bytes, plus a scale of four bytes for each of 256 outputs.
    assert linear_bytes(half) == before // 2 + 3 * 4 * 256
    assert total(summarize(half)).num_parameters == count
    assert summarize(half)[0].dtypes == ("float8_e4m3fn",)


def gradient_of_input(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    module(x).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(6, 5), (2, 3, 6)),
        (nn.Linear(6, 5, bias=False), (2, 6)),
        (nn.Conv1d(6, 4, 3, stride=2, padding=1), (2, 6, 9)),
        (nn.Conv2d(6, 4, 3, padding="same", padding_mode="circular"), (2, 6, 5, 5)),
        (nn.Conv3d(6, 6, (1, 3, 3), groups=3, dilation=(1, 2, 2)), (2, 6, 2, 7, 7)),
    ],
)
def test_outputs_and_gradients_are_those_of_the_rounded_weights(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer = copy.deepcopy(layer).requires_grad_(False)
    rounded = copy.deepcopy(layer)
    rounded.weight.data = fp8.dequantize(*fp8.quantize(layer.weight), torch.float32)
    holder = nn.ModuleDict({"layer": layer})
    fp8.store(holder, ["layer"])
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(holder["layer"](x), rounded(x))
    assert torch.equal(holder["layer"].weight, rounded.weight)
    assert torch.allclose(gradient_of_input(holder["layer"], x), gradient_of_input(rounded, x), atol=1e-6)
    assert holder["layer"](x.bfloat16()).dtype == torch.bfloat16


def test_no_cast_weight_is_stored_for_backward() -> None:
    """Otherwise, the cast weights of all layers would exist at once, twice the memory that FP8 saves."""
    holder = nn.ModuleDict({"m": nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))}).requires_grad_(False)
    fp8.store(holder, ["m"])
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda _: None):
        holder["m"](torch.randn(2, 64, requires_grad=True))
    assert kept == []


def test_adapters_on_fp8_train_and_the_stored_bytes_do_not_change() -> None:
    """The adapters have the gradients that they would have on the rounded weights."""

    def made(rounds: bool) -> nn.Module:
        module = frozen()
        if rounds:
            for part in module.dit.modules():
                if isinstance(part, nn.Linear):
                    part.weight.data = fp8.dequantize(*fp8.quantize(part.weight), torch.float32)
        torch.manual_seed(5)
        lora.inject(module, LoraConfig(base_model="dit", target_modules="q,v,ffn.0", rank=4))
        return module

    stored, rounded = made(rounds=False), made(rounds=True)
    layers = fp8.store(stored, ["dit"])
    assert "dit.blocks.0.attention.q.base_layer" in layers
    before = state_of(stored)
    activation_checkpointing.wrap(stored, ActivationCheckpointingConfig(blocks=("Block",)))
    for one, other in zip(modules.train(stored, 4), modules.train(rounded, 4), strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    changed = differing(before, stored.state_dict())
    assert changed == {name for name in before if "lora_" in name}


def test_a_stored_layer_survives_casts_and_copies() -> None:
    module = frozen()
    fp8.store(module, ["dit"])
    before = output(module)
    assert torch.equal(output(copy.deepcopy(module)), before)
    assert isinstance(module.dit.head, nn.Linear)
    assert module.dit.head.weight.dtype == torch.float32
    stored = {name: tensor.clone() for name, tensor in module.named_parameters() if name.endswith(fp8.STORED)}
    scales = {name: tensor.clone() for name, tensor in module.named_parameters() if name.endswith(fp8.SCALE)}
    module.to(torch.bfloat16).to(torch.float32)
    assert all(
        torch.equal(dict(module.named_parameters())[name], tensor) for name, tensor in {**stored, **scales}.items()
    )
    again = frozen(seed=9)
    fp8.store(again, ["dit"])
    again.load_state_dict(module.state_dict())
    assert torch.equal(output(again), output(module))


def test_weights_that_two_layers_share_are_unchanged() -> None:
    holder = modules.Pair().requires_grad_(False)
    with pytest.raises(ConfigError, match="'tied', which has no linear or convolution layer"):
        fp8.store(holder, ["tied"])
    assert holder.tied.head.weight is holder.tied.embed.weight


def test_trainable_and_unknown_models_are_refused() -> None:
    module = frozen()
    module.dit.head.bias.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"fp8 contains 'dit', but dit.head.bias is trainable; only frozen weights"):
        fp8.store(module, ["dit"])
    with pytest.raises(
        ConfigError, match="'text_encoder', which is neither a part of the training module nor a weight file of"
    ):
        fp8.store(module, ["text_encoder"])
    module.refiner[2].weight.data[0, 0] = float("nan")
    with pytest.raises(ConfigError, match="refiner.2, whose weights are not all finite"):
        fp8.store(module, ["refiner"])
    assert list(fp8.store(module, ["dit.blocks.0.ffn"])) == ["dit.blocks.0.ffn.0", "dit.blocks.0.ffn.2"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_ddp_and_fsdp_work_with_fp8_adapters_and_checkpointed_blocks(how: str) -> None:
    """Two processes have the gradients of one. FSDP1 does not accept two dtypes; FSDP2, used here, does."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "tests.modules.spread", how]
    done = run_command([sys.executable, *launch])
    assert done.stdout.count("the same gradients") == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")
def test_fp8_on_a_gpu_matches_fp8_on_the_cpu() -> None:
    module = frozen(dim=64)
    fp8.store(module, ["dit", "autoencoder"])
    batch = {name: tensor.cuda() for name, tensor in modules.batch().items()}
    before, weight = output(module), module.dit.head.weight
    module.cuda()
    assert torch.equal(module.dit.head.weight.cpu(), weight)
    with torch.no_grad():
        assert distance(module.dit(batch["latents"], batch["times"]).cpu(), before) < 1e-3
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert distance(module.dit(batch["latents"], batch["times"]).cpu(), before) < 0.03
