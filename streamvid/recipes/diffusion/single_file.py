"""Transformers in single safetensors files, as published for ComfyUI and by the authors of models."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from streamvid.errors import ConfigError
from streamvid.modules.parts import some
from streamvid.modules.weight_files import SAFETENSORS, read_state

_SAME = "use a file and a folder that belong to the same model"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def read_single_file(kind: Any, file: Path, config: Path, dtype: torch.dtype) -> nn.Module:
    """Build a model of the diffusers class `kind` with weights from a file. No random numbers are drawn.

    file: safetensors file. Its tensors have the names used by the original code or by diffusers; the latter may begin
        with `transformer.`.
    config: folder with the config.json of the model.
    Raises ConfigError if the file is damaged or quantized, or belongs to another model.
    """
    if file.suffix != SAFETENSORS:
        raise ConfigError(f"{file}: must be a {SAFETENSORS} file; other formats can run code when they are read")
    if not hasattr(kind, "from_single_file"):
        raise ConfigError(f"diffusers cannot read {kind.__name__} from a single file; use the model's folder instead")
    state = _plain(read_state([file]), f"{config.name}.")
    _require_no_adapters(state, file)
    _require_floats(state, file)
    with quiet():
        try:
            module: nn.Module = kind.from_single_file(state, config=str(config), local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:500]
            raise ConfigError(
                f"cannot load {file} as {kind.__name__} with {config / 'config.json'}: {type(error).__name__}: "
                f"{reason}; {_SAME}"
            ) from error
    require_complete(module, file, "use a file and a folder that belong to the same model")
    return _cast(module, dtype).eval()


def require_complete(module: nn.Module, source: Path, remedy: str, missing: Collection[str] = ()) -> None:
    """Raise ConfigError if no weights were found for some parameters of a model.

    source: file or folder that the model was read from.
    missing: names of the tensors that the library did not find and filled with random numbers.
    """
    lacking = [name for name, one in module.named_parameters() if one.is_meta or name in missing]
    if lacking:
        raise ConfigError(f"{source} lacks the tensors {some(lacking)} of {type(module).__name__}; {remedy}")


def single_file_remedy(file: str) -> str:
    """Return advice for a user who specified a file instead of a model's folder."""
    return (
        "specify the folder of its pipeline, which contains the VAE and the text encoders, and use the file for the "
        f"transformer: --model FOLDER --set model.args.transformer={file}"
    )


def _plain(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Remove `prefix` from the tensor names if all names begin with it, as in files that a run saved."""
    if not all(name.startswith(prefix) for name in state):
        return state
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def _require_no_adapters(state: dict[str, Tensor], file: Path) -> None:
    if any(".lora_" in name for name in state):
        raise ConfigError(
            f"{file} contains adapters (LoRA), not the weights of a model; omit model.args.transformer, and start from "
            f"these adapters with --lora and --set model.lora.checkpoint={file}"
        )


def _require_floats(state: dict[str, Tensor], file: Path) -> None:
    kinds = sorted({str(one.dtype).removeprefix("torch.") for one in state.values() if one.dtype not in _DTYPES})
    if kinds:
        raise ConfigError(
            f"{file} is quantized (it contains tensors of type {some(kinds)}); use the model in bfloat16, float16 or "
            "float32. To store frozen weights in FP8, set model.fp8"
        )


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Convert weights to `dtype`, except for the parts that `from_pretrained` keeps in float32."""
    exact = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if exact & set(name.split(".")) else dtype)
    return module


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of transformers and diffusers, which would interleave with the logs of several ranks."""
    import diffusers.utils.logging as of_diffusers
    import transformers.utils.logging as of_transformers

    shown = [one for one in (of_diffusers, of_transformers) if one.is_progress_bar_enabled()]
    for one in shown:
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one in shown:
            one.enable_progress_bar()
