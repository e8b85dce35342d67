"""Conversion of adapter files between formats."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from streamvid.errors import ConfigError
from streamvid.modules.adapters.formats import EncodedAdapters, encode_adapters
from streamvid.modules.adapters.layers import paired
from streamvid.modules.adapters.names import plain_layer, require_known
from streamvid.modules.adapters.reading import read_adapters
from streamvid.modules.config import LoraFormat

#: Beginning of a pipeline's class name → family. The first match counts.
_PIPELINES = (
    ("HunyuanVideo15", "hunyuanvideo1.5"),
    ("HunyuanVideo", "hunyuanvideo"),
    ("LTX2", "ltx-2"),
    ("LTX", "ltx-video"),
    ("CogVideoX", "cogvideox"),
    ("Mochi", "mochi"),
    ("Wan", "wan"),
)
_RENAMED: tuple[LoraFormat, ...] = ("diffsynth", "kohya", "comfyui")


@dataclass(frozen=True)
class ConvertedAdapters:
    """Adapters that were converted to another format.

    num_layers: number of layers with adapters in the source file.
    """

    encoded: EncodedAdapters
    num_layers: int


def convert_adapters(path: Path, format: LoraFormat, family: str | None = None) -> ConvertedAdapters:
    """Read an adapter file in any supported format, and return its content in `format`.

    family: name in FAMILIES; None detects the family from the layers.
    Raises ConfigError if the file contains anything other than pairs of LoRA tensors. Also raises ConfigError if a
    layer's name in `format` is unknown, or differs between the families that have this layer.
    """
    found = read_adapters(path, "the file")
    adapters = {plain_layer(name): one for name, one in paired(found.tensors, found.scales, str(path)).items()}
    if format in _RENAMED or any(layer.startswith("lora_") for layer in adapters):
        require_known(adapters, family, str(path))
    return ConvertedAdapters(encode_adapters(adapters, format, family=family), len(adapters))


def family_of(model: Path) -> str | None:
    """Return the model family of a diffusers folder, or None if the family is not supported."""
    index = model / "model_index.json"
    try:
        name = str(json.loads(index.read_text(encoding="utf-8")).get("_class_name", "")) if index.is_file() else ""
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"cannot read {index} ({error}); copy the model again") from error
    return next((family for begin, family in _PIPELINES if name.startswith(begin)), None)
