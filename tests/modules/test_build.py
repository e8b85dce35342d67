"""Tests of building the training module from its configuration: factories, trainable parameters, dtypes and modes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from streamvid.errors import ConfigError
from streamvid.modules.build import build_module, train_mode
from streamvid.modules.config import ActivationCheckpointingConfig, LoraConfig, ModelConfig, WeightsConfig
from streamvid.modules.factory import call_factory, import_object
from streamvid.modules.optimizer import OptimizerConfig, build_optimizer
from tests.modules import modules
from tests.modules.modules import differing, state_of

BUILD = "tests.modules.modules:build"


def make(lora: LoraConfig | None = None, task: str = "sft", **fields: Any) -> nn.Module:
    options = {name: fields.pop(name) for name in ("seed", "dtype_of_frozen") if name in fields}
    weights = WeightsConfig(paths=fields.pop("paths", ()))
    config = ModelConfig(**{"factory": BUILD, "lora": lora or LoraConfig(), "weights": weights, **fields})
    return build_module(config, task=task, **{"seed": 0, **options})


def test_the_same_seed_gives_the_same_module_and_global_randomness_is_left_alone() -> None:
    torch.manual_seed(77)
    np.random.seed(77)
    before = torch.get_rng_state()
    first, again, other = make(seed=3), make(seed=3), make(seed=4)
    assert torch.equal(torch.get_rng_state(), before)
    same = [torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)]
    differ = [not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True)]
    assert all(same)
    assert any(differ)


def test_initial_adapters_do_not_depend_on_the_encoder() -> None:
    """Split training has the losses of one stage, so trained weights may not depend on what else the factory builds."""
    lora = LoraConfig(base_model="dit", target_modules="q,v", rank=4)
    one, split = make(lora, trainable=()), make(lora, trainable=(), task="sft:train")
    assert split.autoencoder is None
    with_encoder = state_of(one)
    for name, tensor in state_of(split).items():
        assert torch.equal(tensor, with_encoder[name]), name


@pytest.mark.parametrize(
    ("factory", "said"),
    [
        ("no_such_package.train:build", "the module 'no_such_package' is neither installed"),
        ("tests.modules.no_such:build", "the module 'tests.modules.no_such' is neither"),
        ("tests.modules.modules:bulid", "does not define 'bulid'; available: build"),
        ("tests.modules.modules:THREE", "has type int and cannot be called"),
        ("tests.modules.modules:no_module", "returned an object of type int; it must return a torch.nn.Module"),
    ],
)
def test_a_wrong_factory_is_refused_with_the_reason(factory: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(factory=factory)


def test_missing_files_are_reported_before_anything_is_built(tmp_path: Path) -> None:
    lora = LoraConfig(base_model="dit", checkpoint=tmp_path / "a", preset_path=tmp_path / "b", preset_model="dit")
    with pytest.raises(
        ConfigError,
        match=r"checkpoint is .*/a, which does not exist, and model.lora.preset_path is .*/b, which does not exist; "
        ".*peft folder",
    ):
        make(lora, factory="no_such_package:build")
    with pytest.raises(ConfigError, match="c.safetensors does not exist"):
        make(paths=(str(tmp_path / "c.safetensors"),), factory="no_such_package:build")


def test_arguments_that_a_factory_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"with these arguments: got an unexpected keyword .*'width'"):
        make(args={"width": 3})


def test_an_error_inside_a_users_module_is_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_training_a.py").write_text("import no_such_library_x\n")
    (tmp_path / "broken_training_b.py").write_text("width = 3 / 0\n")
    with pytest.raises(
        ConfigError, match="importing broken_training_a failed with ModuleNotFoundError: No module named 'no_such_lib"
    ):
        import_object("broken_training_a:build")
    with pytest.raises(ConfigError, match="importing broken_training_b failed with ZeroDivisionError"):
        import_object("broken_training_b:build")


def test_a_module_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    text = "import torch\nclass Own:\n    @staticmethod\n    def build(path, task):\n        return torch.nn.Linear(path, len(task))\n"
    (tmp_path / "train_of_this_test.py").write_text(text)
    # Factories may have a parameter named `path`.
    made = call_factory("train_of_this_test:Own.build", {"path": 3}, {"task": "sft"})
    assert (made.in_features, made.out_features) == (3, 3)


def test_only_named_parameters_train_and_frozen_ones_keep_their_bytes(tmp_path: Path) -> None:
    """Row 21: dotted names select what trains; nothing else changes, including the buffers of frozen norms."""
    module = make(trainable=("dit.blocks.1", "refiner.0.bias"))
    before = state_of(module)
    modules.train(train_mode(module))
    with torch.no_grad():
        module(modules.clip())
    changed = differing(before, module.state_dict())
    wanted = {name for name in before if name.startswith("dit.blocks.1.")} | {"refiner.0.bias"}
    assert changed == wanted


def test_without_names_everything_but_the_encoders_trains() -> None:
    module = make()
    trains = {name.partition(".")[0] for name, p in module.named_parameters() if p.requires_grad}
    assert trains == {"dit", "refiner"}
    assert not module.autoencoder.norm.training
    assert module.dit.blocks[0].dropout.training


def test_train_mode_leaves_frozen_parts_in_eval_mode() -> None:
    module = make(trainable=("dit.blocks.1",))
    module.train()
    train_mode(module)
    assert not module.autoencoder.training
    assert not module.refiner.training
    assert not module.dit.blocks[0].dropout.training
    assert module.dit.blocks[1].dropout.training
    assert module.dit.training


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"trainable": ("dit.block",)}, "model.trainable contains 'dit.block', .*, such as dit.blocks"),
        ({"trainable": ("autoencoder.first",)}, "belongs to an encoder"),
    ],
)
def test_invalid_trainable_names_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(**fields)


def test_a_module_without_trainable_parameters_is_refused() -> None:
    said = r"no parameter is trainable; set model.trainable or .* \(all children: dit, refiner, autoencoder"
    with pytest.raises(ConfigError, match=said):
        build_optimizer(OptimizerConfig(), make(trainable=()))


def test_trained_parameters_are_float32_and_large_frozen_layers_as_configured() -> None:
    lora = LoraConfig(base_model="dit", target_modules="q")
    module = make(lora, trainable=("refiner",), dtype_of_frozen=torch.bfloat16)
    large = {id(p) for part in module.modules() if isinstance(part, nn.Linear | nn.Conv3d) for p in part.parameters()}
    for name, parameter in module.named_parameters():
        is_half = id(parameter) in large and not parameter.requires_grad
        assert parameter.dtype == (torch.bfloat16 if is_half else torch.float32), name
    as_made = make(lora, trainable=("refiner",))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = module(modules.batch())
        loss.backward()
        assert torch.equal(loss, as_made(modules.batch()))  # autocast computes with bfloat16 weights in either case
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters() if p.requires_grad)


def test_full_weights_of_two_models_and_adapters_of_a_third_train_together() -> None:
    """Row 22: full weights and adapters train in one module, and nothing else changes."""
    lora = LoraConfig(base_model="dit", target_modules="q,k", rank=2)
    module = make(lora, trainable=("refiner", "dit.head"))
    before = state_of(module)
    modules.train(module)
    changed = differing(before, module.state_dict())
    adapters = {name for name in before if "lora_" in name}
    assert len(adapters) == 2 * 2 * 2
    full = {name for name in before if name.startswith(("refiner.", "dit.head."))}
    assert changed == adapters | full


@pytest.mark.parametrize(
    ("base", "trainable", "said"),
    [
        ("dit", ("dit",), "'dit' and model.lora.base_model is 'dit', but adapters require frozen weights"),
        ("dit", ("dit.blocks.0",), "would be trained both directly and through adapters"),
        ("autoencoder", (), "belongs to an encoder and therefore runs without gradients"),
        (
            "unet",
            (),
            "base_model is 'unet', which the training module does not have; allowed: dit, refiner, autoencoder",
        ),
        ("", (), "base_model is ''"),
    ],
)
def test_adapters_on_invalid_models_are_refused(base: str, trainable: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(LoraConfig(base_model=base, target_modules="q" if base == "dit" else ""), trainable=trainable)


def test_encoding_trains_nothing_and_adds_no_adapters() -> None:
    module = make(LoraConfig(base_model="dit", target_modules="q"), task="sft:data_process", trainable=("dit",))
    assert not any(p.requires_grad for p in module.parameters())
    assert not any(part.training for part in module.modules())
    assert not any("lora_" in name for name in module.state_dict())


def test_a_meta_module_has_only_weights_from_files_and_computed_tables(tmp_path: Path) -> None:
    """Row 42: no memory is allocated for weights that files replace."""
    whole = make()
    save_file(whole.dit.state_dict(), tmp_path / "dit.safetensors")
    save_file(whole.refiner.state_dict(), tmp_path / "refiner.safetensors")
    paths = (str(tmp_path / "refiner.safetensors"), str(tmp_path / "dit.safetensors"))
    module = make(init="meta", paths=paths, task="sft:train", seed=5)
    assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    assert torch.equal(module.dit.positions, whole.dit.positions)
    assert torch.equal(module(modules.batch()), whole(modules.batch()))
    with pytest.raises(
        ConfigError, match=r"no weight file contains refiner.0.weight, .*meta tensors.*factory initializes"
    ):
        make(init="meta", paths=paths[1:], task="sft:train")


def test_weights_that_a_meta_factory_creates_on_the_cpu_are_kept(tmp_path: Path) -> None:
    """An encoder from a package comes with its weights, so no file is listed for it."""
    factory = "tests.modules.modules:build_with_its_encoder"
    save_file(make().dit.state_dict(), tmp_path / "dit.safetensors")
    save_file(make().refiner.state_dict(), tmp_path / "refiner.safetensors")
    paths = (str(tmp_path / "refiner.safetensors"), str(tmp_path / "dit.safetensors"))
    module, whole = make(factory=factory, init="meta", paths=paths), make(factory=factory)
    for name, tensor in module.autoencoder.state_dict().items():
        assert torch.equal(tensor, whole.autoencoder.state_dict()[name])
    assert not any(parameter.is_meta for parameter in module.parameters())


def test_all_options_work_together(tmp_path: Path) -> None:
    """Weights from files, adapters, FP8 and checkpointed blocks are combined with a fully trained model."""
    whole = make(seed=1)
    save_file(whole.dit.state_dict(), tmp_path / "dit.safetensors")
    module = make(
        LoraConfig(base_model="dit", target_modules="q,k,v,o,ffn.0,ffn.2", rank=4),
        activation_checkpointing=ActivationCheckpointingConfig(blocks=("Block",)),
        paths=(str(tmp_path / "dit.safetensors"),),
        trainable=("refiner",),
        fp8=(str(tmp_path / "dit.safetensors"), "autoencoder"),
    )
    before = state_of(module)
    losses = [module(modules.batch()).item(), *modules.train(module, 12), module(modules.batch()).item()]
    assert losses[-1] < losses[0]
    moved = differing(before, module.state_dict())
    assert moved == {name for name, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("task", ["sft", "sft:data_process"])
def test_an_encoder_named_by_its_file_is_in_fp8_in_every_task(tmp_path: Path, task: str) -> None:
    path = str(tmp_path / "autoencoder.safetensors")
    save_file(make(seed=1).autoencoder.state_dict(), path)
    by_path = make(task=task, paths=(path,), fp8=(path,))
    by_name = make(task=task, paths=(path,), fp8=("autoencoder",))
    assert any(name.endswith("_fp8") for name in by_path.autoencoder.state_dict())
    assert by_path.autoencoder.state_dict().keys() == by_name.autoencoder.state_dict().keys()
