"""Tests of adapters: the choice of layers, their computation, and files that plain peft can write and read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules import lora, saving
from streamvid.modules.adapters.reading import is_adapter, plain_name
from streamvid.modules.config import LoraConfig, LoraFormat
from tests.modules import modules
from tests.modules.modules import differing, state_of
from tests.modules.wan import wan, wan_output

TARGETS = ("q", "k", "v", "o", "ffn.0", "ffn.2")


def adapted(seed: int = 0, trained: bool = True, dim: int = 16, **fields: object) -> nn.Module:
    """Build a training module with adapters on its denoiser; they change its output if `trained`."""
    torch.manual_seed(seed)
    module = modules.build(dim=dim, task="sft:train")
    config = LoraConfig(**{"base_model": "dit", "target_modules": TARGETS, "rank": 4, **fields})
    lora.inject(module, config)
    if trained:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if is_adapter(name):
                    parameter.normal_(std=0.1)
    return module


def save(module: nn.Module, path: Path, lora_format: LoraFormat = "diffusers") -> Path:
    """Write the adapters to `path`, or for peft to a folder next to it; return the file that holds the tensors."""
    (file,) = [file for file in saving.files(module, saving.changing(module), lora_format) if file.metadata]
    saving.write(file, path.with_suffix(""))
    return path.with_suffix("") / "adapter_model.safetensors" if lora_format == "peft" else path


def unadapted(seed: int) -> nn.Module:
    """Return the denoiser of `adapted(seed)` without its adapters."""
    torch.manual_seed(seed)
    denoiser: nn.Module = modules.build(task="sft:train").dit
    return denoiser


def output(module: nn.Module) -> Tensor:
    with torch.no_grad():
        batch = modules.batch()
        return module.dit(batch["latents"], batch["times"])


def test_base_and_adapter_equal_the_merged_weights() -> None:
    """Row 29; alpha differs from the rank, so that the scale matters."""
    module = adapted(alpha=6.0)
    plain = modules.build(task="sft:train")
    own = module.dit.state_dict()
    for name, parameter in plain.dit.named_parameters():
        layer = name.removesuffix(".weight")
        merged = own.get(
            name, own.get(f"{layer}.base_layer.weight", own.get(name.replace(".bias", ".base_layer.bias")))
        )
        if f"{layer}.lora_A.default.weight" in own:
            merged = merged + 6.0 / 4 * own[f"{layer}.lora_B.default.weight"] @ own[f"{layer}.lora_A.default.weight"]
        parameter.data = merged
    assert torch.allclose(output(module), output(plain), atol=1e-5)
    assert not torch.allclose(output(module), output(adapted(trained=False)), atol=1e-3)


def test_a_fused_preset_equals_base_and_adapter(tmp_path: Path) -> None:
    """Row 32: a fused preset changes only the target layers."""
    module = adapted(alpha=6.0)
    path = save(module, tmp_path / "preset.safetensors")
    torch.manual_seed(0)
    fused = modules.build(task="sft:train")
    before = state_of(fused)
    assert lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="dit")) == 2 * len(TARGETS)
    assert torch.allclose(output(fused), output(module), atol=1e-5)
    changed = differing(before, fused.state_dict())
    assert changed == {name for name in before if any(name.endswith(f".{end}.weight") for end in TARGETS)}


def test_a_preset_of_a_convolution_is_fused_as_peft_computes_it(tmp_path: Path) -> None:
    torch.manual_seed(1)
    holder = nn.ModuleDict({"model": nn.Sequential(nn.Conv3d(3, 5, (1, 3, 3), padding="same"), nn.SiLU())})
    plain = nn.ModuleDict({"model": nn.Sequential(nn.Conv3d(3, 5, (1, 3, 3), padding="same"), nn.SiLU())})
    plain.load_state_dict(holder.state_dict())
    lora.inject(holder, LoraConfig(base_model="model", target_modules="0", rank=2))
    nn.init.normal_(holder["model"][0].lora_B["default"].weight)
    path = save(holder, tmp_path / "preset.safetensors")
    lora.fuse_preset(plain, LoraConfig(preset_path=path, preset_model="model"))
    x = torch.randn(2, 3, 2, 6, 6)
    with torch.no_grad():
        assert torch.allclose(plain["model"](x), holder["model"](x), atol=1e-5)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"blocks.0.attention.q.lora_A.weight": (2, 16)}, "has no counterpart"),
        (
            {"blocks.9.attention.q.lora_A.weight": (2, 16), "blocks.9.attention.q.lora_B.weight": (16, 2)},
            "matches no layer",
        ),
        ({"embed.lora_A.weight": (2, 16), "embed.lora_B.weight": (16, 2)}, "use adapters for this model"),
        ({"embed.weight": (2, 16)}, "contains no lora_A or lora_B tensors; use a LoRA adapter file"),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(tmp_path: Path, state: dict[str, tuple[int, ...]], said: str) -> None:
    save_file({name: torch.zeros(shape) for name, shape in state.items()}, tmp_path / "p.safetensors")
    with pytest.raises(ConfigError, match=said):
        lora.fuse_preset(modules.build(), LoraConfig(preset_path=tmp_path / "p.safetensors", preset_model="dit"))


@pytest.mark.parametrize("targets", ["q,v", "head", "ffn.0,embed"])
def test_a_saved_folder_loads_in_peft(tmp_path: Path, targets: str) -> None:
    """Warnings are errors, so peft finds every adapter and its weights. "head" is not the suffix of any other layer."""
    import peft

    module = adapted(alpha=6.0, target_modules=targets)
    folder = save(module, tmp_path / "lora.safetensors", "peft").parent
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["alpha_pattern"], config["rank_pattern"]) == (4, 6.0, {}, {})
    plain = unadapted(0)
    theirs = peft.PeftModel.from_pretrained(plain, str(folder))
    batch = modules.batch()
    with torch.no_grad():
        assert torch.equal(theirs(batch["latents"], batch["times"]), output(module))
    names = {name for name, _ in theirs.base_model.model.named_parameters() if is_adapter(name)}
    assert names == {name for name, _ in module.dit.named_parameters() if is_adapter(name)}
    assert save(module, tmp_path / "lora.safetensors", "peft").parent == folder  # replaces the previous folder


@pytest.mark.parametrize("prefix", ["", "dit.", "pipe.dit.", "base_model.model."])
@pytest.mark.parametrize("middle", [".", ".default."])
def test_a_checkpoint_is_accepted_with_all_forms_of_its_keys(tmp_path: Path, prefix: str, middle: str) -> None:
    """Row 31: a checkpoint may have any of the usual prefixes, and `.default` in its keys."""
    module = adapted(target_modules="q,v")
    state = lora.adapter_state(saving.changing(module), lora.bases_of(module)[0])
    renamed = {prefix + name.replace(".weight", f"{middle}weight"): tensor for name, tensor in state.items()}
    save_file(renamed, tmp_path / "lora.safetensors")
    again = adapted(trained=False, target_modules="q,v", checkpoint=tmp_path / "lora.safetensors")
    assert torch.equal(output(again), output(module))


FORMATS: tuple[LoraFormat, ...] = get_args(LoraFormat)


@pytest.mark.parametrize("lora_format", FORMATS)
@pytest.mark.parametrize("alpha", [None, 6.0])
def test_every_format_is_read_with_its_scale(tmp_path: Path, lora_format: LoraFormat, alpha: float | None) -> None:
    module = adapted(alpha=alpha)
    path = save(module, tmp_path / "lora.safetensors", lora_format)
    torch.manual_seed(0)
    fused = modules.build(task="sft:train")
    lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="dit"))
    assert torch.allclose(output(fused), output(module), atol=1e-5)
    given = {"alpha": 4.0 if lora_format in ("diffsynth", "comfyui") else alpha, "checkpoint": path}
    assert torch.allclose(output(adapted(trained=False, **given)), output(module), atol=1e-5)
    with pytest.raises(ConfigError, match=r"alpha is 5.5, but .*; set model.lora.alpha="):
        adapted(trained=False, **given | {"alpha": 5.5})


@pytest.mark.parametrize("alpha", [None, 16.0])
def test_diffusers_loads_saved_adapters_with_their_scale(tmp_path: Path, alpha: float | None) -> None:
    """The file is loaded as by the pipelines; there, a file without matching layers causes only a warning."""
    holder = nn.ModuleDict({"dit": wan()})
    config = LoraConfig(base_model="dit", target_modules="to_q,to_v,ffn.net.2", rank=8, alpha=alpha)
    lora.inject(holder, config)
    for name, parameter in holder.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2)
    path = save(holder, tmp_path / "lora.safetensors")
    theirs = wan()
    before = wan_output(theirs)
    theirs.load_lora_adapter(str(tmp_path), weight_name=path.name)
    assert torch.allclose(wan_output(theirs), wan_output(holder["dit"]), atol=1e-5)
    assert not torch.allclose(before, wan_output(theirs), atol=1e-2)


def test_adapters_of_the_second_expert_load_into_it(tmp_path: Path) -> None:
    """For Wan 2.2 A14B, an argument and not the prefix of the keys selects the pipeline's second transformer."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    holder = nn.ModuleDict({"transformer": wan(), "transformer_2": wan()})
    lora.inject(holder, LoraConfig(base_model="transformer_2", target_modules="to_q,to_v", rank=8, alpha=16.0))
    for name, parameter in holder.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(parameter, std=0.2)
    path = save(holder, tmp_path / "lora.safetensors")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    pipe = WanPipeline(None, None, None, scheduler, transformer=wan(), transformer_2=wan(), boundary_ratio=0.9)
    pipe.load_lora_weights(str(tmp_path), weight_name=path.name, load_into_transformer_2=True)
    assert torch.allclose(wan_output(pipe.transformer_2), wan_output(holder["transformer_2"]), atol=1e-5)
    assert torch.equal(wan_output(pipe.transformer), wan_output(wan()))
    fused = nn.ModuleDict({"transformer": wan(), "transformer_2": wan()})
    lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="transformer_2"))
    assert torch.allclose(wan_output(fused["transformer_2"]), wan_output(holder["transformer_2"]), atol=1e-4)


@pytest.mark.parametrize("alpha", [8.0, 16.0])
def test_adapters_saved_by_diffusers_are_read_with_their_scale(tmp_path: Path, alpha: float) -> None:
    import peft
    from diffusers import WanPipeline
    from peft.utils import get_peft_model_state_dict

    theirs = wan()
    theirs.add_adapter(peft.LoraConfig(r=8, lora_alpha=alpha, target_modules=["to_q", "to_v"]))
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    layers = get_peft_model_state_dict(theirs)
    facts = theirs.peft_config["default"].to_dict()
    WanPipeline.save_lora_weights(str(tmp_path), layers, transformer_lora_adapter_metadata=facts)
    fused = nn.ModuleDict({"dit": wan()})
    lora.fuse_preset(fused, LoraConfig(preset_path=next(tmp_path.glob("*.safetensors")), preset_model="dit"))
    assert torch.allclose(wan_output(fused["dit"]), wan_output(theirs), atol=1e-4)


def test_alpha_of_a_peft_folder_and_of_single_layers_is_read(tmp_path: Path) -> None:
    import peft

    module = adapted(alpha=6.0, target_modules="q,v")
    state = lora.adapter_state(saving.changing(module), lora.bases_of(module)[0])
    prefixed = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
    save_file(prefixed, tmp_path / "adapter_model.safetensors")
    peft.LoraConfig(r=4, lora_alpha=6.0, target_modules=["q", "v"]).save_pretrained(str(tmp_path))
    comfy = {
        f"diffusion_model.{name}".replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
        for name, tensor in state.items()
    }
    layers = {name.partition(".lora_down")[0] for name in comfy if "lora_down" in name}
    save_file(comfy | {f"{name}.alpha": torch.tensor(6.0) for name in layers}, tmp_path / "comfy.safetensors")
    for name in ("adapter_model", "comfy"):
        torch.manual_seed(0)
        fused = modules.build(task="sft:train")
        lora.fuse_preset(fused, LoraConfig(preset_path=tmp_path / f"{name}.safetensors", preset_model="dit"))
        assert torch.allclose(output(fused), output(module), atol=1e-5), name


def test_a_pattern_of_alphas_applies_as_in_peft(tmp_path: Path) -> None:
    """An alpha may be 0, and a pattern matches only whole components of a name."""
    import peft

    def block() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({name: nn.Linear(8, 8) for name in ("q", "to_q", "v", "k")})

    patterns = {"q": 0, "^block.v": 3}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q", "to_q", "v", "k"], alpha_pattern=patterns)
    theirs = peft.PeftModel(nn.ModuleDict({"block": block()}), config)
    for name, parameter in theirs.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(str(tmp_path))
    path = tmp_path / "adapter_model.safetensors"
    fused = nn.ModuleDict({"dit": nn.ModuleDict({"block": block()})})
    lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="dit"))
    merged = theirs.merge_and_unload()
    for name, layer in merged["block"].items():
        assert torch.allclose(fused["dit"]["block"][name].weight, layer.weight, atol=1e-5), name
    start = LoraConfig(base_model="dit", target_modules="q,to_q,v,k", rank=4, alpha=6.0, checkpoint=path)
    with pytest.raises(
        ConfigError, match=r"has alphas 0.0, 3.0, 6.0, but .*; to fuse the checkpoint .* set model.lora.preset_path"
    ):
        lora.inject(nn.ModuleDict({"dit": nn.ModuleDict({"block": block()})}), start)


@pytest.mark.parametrize("component", ["transformer", "text_encoder"])
def test_each_component_of_a_file_has_its_own_alpha(tmp_path: Path, component: str) -> None:
    alphas = {"transformer": 6.0, "text_encoder": 1.0}
    pipe = nn.ModuleDict({name: adapted(seed, alpha=alpha).dit for seed, (name, alpha) in enumerate(alphas.items())})
    state = {name: one for name, one in pipe.named_parameters() if is_adapter(name)}
    header = {"lora_adapter_metadata": json.dumps({f"{name}.lora_alpha": alpha for name, alpha in alphas.items()})}
    for file, prefix in {"all": "", "one": f"{component}."}.items():
        chosen = {plain_name(name): one for name, one in state.items() if name.startswith(prefix)}
        save_file(chosen, tmp_path / f"{file}.safetensors", metadata=header)
    plain = nn.ModuleDict({name: unadapted(seed) for seed, name in enumerate(alphas)})
    lora.fuse_preset(
        nn.ModuleDict({"pipe": plain}), LoraConfig(preset_path=tmp_path / "all.safetensors", preset_model="pipe")
    )
    single = nn.ModuleDict({"dit": unadapted(list(alphas).index(component))})
    lora.fuse_preset(single, LoraConfig(preset_path=tmp_path / "one.safetensors", preset_model="dit"))
    batch = modules.batch()
    with torch.no_grad():
        expected = pipe[component](batch["latents"], batch["times"])
        for fused in (plain[component], single["dit"]):
            assert torch.allclose(fused(batch["latents"], batch["times"]), expected, atol=1e-5)


@pytest.mark.parametrize(("stated", "alpha"), [("2.0", 2.0), ("0", 4.0), ("None", 4.0)])
def test_alpha_of_the_header_of_kohya_is_read(tmp_path: Path, stated: str, alpha: float) -> None:
    """In kohya's trainers, 0 means the rank; they write None if no alpha was given."""
    module = adapted(alpha=alpha, target_modules="q,v")
    state = {
        f"diffusion_model.{name}".replace("lora_A", "lora_down").replace("lora_B", "lora_up"): tensor
        for name, tensor in lora.adapter_state(saving.changing(module), lora.bases_of(module)[0]).items()
    }
    path = tmp_path / "kohya.safetensors"
    save_file(state, path, metadata={"ss_network_alpha": stated, "ss_network_dim": "4"})
    torch.manual_seed(0)
    fused = modules.build(task="sft:train")
    lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="dit"))
    assert torch.allclose(output(fused), output(module), atol=1e-5)
    save_file(state, path, metadata={"ss_network_alpha": "high"})
    with pytest.raises(ConfigError, match="adapter metadata .* is damaged"):
        lora.fuse_preset(fused, LoraConfig(preset_path=path, preset_model="dit"))


@pytest.mark.parametrize("prefix", ["lora_unet_", "lora_transformer_"])
def test_underscores_of_kohya_are_the_dots_of_the_model(tmp_path: Path, prefix: str) -> None:
    """Kohya's trainers and musubi-tuner write keys like lora_unet_blocks_0_ffn_2.lora_down.weight and .alpha."""
    module = adapted(alpha=2.0)
    state = {}
    for name, tensor in lora.adapter_state(saving.changing(module), lora.bases_of(module)[0]).items():
        layer, part = name.removesuffix(".weight").rsplit(".", 1)
        theirs = prefix + layer.replace(".", "_")
        state[f"{theirs}.{'lora_down' if part == 'lora_A' else 'lora_up'}.weight"] = tensor
        state[f"{theirs}.alpha"] = torch.tensor(2.0)
    path = tmp_path / "kohya.safetensors"
    save_file(state, path)
    again = adapted(trained=False, alpha=2.0, checkpoint=path)
    assert torch.equal(output(again), output(module))
    save_file({key.replace("ffn_2", "ffn_9"): tensor for key, tensor in state.items()}, path)
    with pytest.raises(ConfigError, match=r"unexpected adapters: \S*ffn_9"):
        adapted(trained=False, alpha=2.0, checkpoint=path)


def test_a_checkpoint_of_other_layers_rank_or_alpha_is_refused(tmp_path: Path) -> None:
    path = save(adapted(target_modules="q,v"), tmp_path / "lora.safetensors")
    with pytest.raises(
        ConfigError, match=r"missing adapters: blocks.0.attention.k.lora_A.weight.*unexpected adapters: none"
    ):
        adapted(target_modules="q,k,v", checkpoint=path)
    with pytest.raises(
        ConfigError,
        match=r"missing adapters: none; unexpected adapters: blocks.0.attention.v.lora_A",
    ):
        adapted(target_modules="q", checkpoint=path)
    with pytest.raises(
        ConfigError, match=r"lora_A.weight has shape \(4, 16\), but model.lora.rank=8 requires \(8, 16\)"
    ):
        adapted(target_modules="q,v", rank=8, alpha=4, checkpoint=path)
    with pytest.raises(ConfigError, match=r"alpha is 8, but .* have alpha 4.0; set model.lora.alpha=4.0"):
        adapted(target_modules="q,v", alpha=8, checkpoint=path)


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [
        ("q", ["blocks.0.attention.q", "blocks.1.attention.q"]),
        ("attention.q, head", ["blocks.0.attention.q", "blocks.1.attention.q", "head"]),
        (("0.ffn.2",), ["blocks.0.ffn.2"]),
        ("regex:blocks\\.1\\.attention\\.[qk]", ["blocks.1.attention.q", "blocks.1.attention.k"]),
    ],
)
def test_layers_are_named_by_suffix_or_regular_expression(wanted: str | tuple[str, ...], layers: list[str]) -> None:
    """A single name is also a suffix, where peft would treat it as a regular expression."""
    base = modules.build().dit
    assert list(lora.choose_targets(base, wanted)) == layers


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("to_q", "'to_q', but no layer has this name .*; use suffixes such as 0, 2, embed, head, k"),
        ("q,w", "'w', but no layer has this name"),
        ("regex:q", "'q' matches no full name"),
        ("regex:(", "is not a valid regular expression"),
        ("ffn", r"matches blocks.0.ffn \(Sequential\), blocks.1.ffn \(Sequential\)"),
    ],
)
def test_names_that_match_no_layer_are_refused(wanted: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        lora.choose_targets(modules.build().dit, wanted)


def test_layers_that_attention_uses_without_their_forward_are_refused() -> None:
    layer = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "out": nn.Linear(8, 8)})
    with pytest.raises(ConfigError, match="attention.out_proj"):
        lora.choose_targets(layer, "out_proj")


def test_layers_are_chosen_by_size_within_blocks_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Row 30: without target_modules, large linear layers within blocks are chosen, and the log lists them."""
    small = modules.build(dim=16, depth=2).dit
    inside = [name for name, part in small.named_modules() if isinstance(part, nn.Linear) and "blocks." in name]
    assert list(lora.choose_targets(small, "")) == inside
    mixed = modules.build(dim=16, depth=2).dit
    mixed.blocks[1].attention.k = nn.Linear(512, 600)
    mixed.blocks[1].attention.v = nn.Linear(511, 600)
    assert list(lora.choose_targets(mixed, "")) == ["blocks.1.attention.k"]
    with pytest.raises(ConfigError, match="no ModuleList of the model has a linear layer"):
        lora.choose_targets(modules.build(depth=1).dit, "")
    with caplog.at_level(logging.INFO):
        adapted(target_modules="")
    assert (
        "12 layers of dit (chosen automatically, because target_modules is empty): blocks.*.attention.q, blocks"
        in caplog.text
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_are_float32_and_have_no_initial_effect(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = modules.build(task="sft:train").to(dtype)
    batch = {name: tensor.to(dtype) for name, tensor in modules.batch().items()}
    with torch.no_grad():
        before = module.dit(batch["latents"], batch["times"])
        lora.inject(module, LoraConfig(base_model="dit", target_modules=TARGETS, rank=4, dropout=0.5))
        assert torch.equal(module.dit(batch["latents"], batch["times"]), before)
    named = dict(module.dit.named_parameters())
    assert all(p.dtype == torch.float32 for name, p in named.items() if is_adapter(name))
    assert {name for name, p in named.items() if p.requires_grad} == {name for name in named if is_adapter(name)}
