"""Folder of a diffusers pipeline: `model_index.json` and one subfolder per component.

A transformer may be in a single file instead, with the names of diffusers or of the original code. Only safetensors
are read, no code in the folder runs, and a component's class must be one that the recipe allows.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamvid.errors import ConfigError
from streamvid.modules.weight_files import SAFETENSORS, problem_of
from streamvid.recipes.diffusion.single_file import quiet, read_single_file, require_complete, single_file_remedy

INDEX = "model_index.json"
_MAX_INDEX_BYTES = 1 << 20
_AGAIN = "copy or download the model again, with all of its folders and files"
_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")


@dataclass(frozen=True)
class ModelFolder:
    """Folder that contains a diffusers pipeline.

    index: content of `model_index.json`, which lists each component as [library, class].
    """

    root: Path
    index: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        """Class name of the pipeline."""
        return str(self.index.get("_class_name"))

    def class_of(self, name: str) -> str | None:
        """Return the class name of a component, or None if the pipeline lacks it."""
        entry = self.index.get(name)
        found = entry[1] if isinstance(entry, list) and len(entry) == 2 else None
        return found if isinstance(found, str) else None

    def setting(self, name: str, default: Any) -> Any:
        """Return a setting of the pipeline, such as `boundary_ratio`, or `default` if the pipeline does not set it."""
        found = self.index.get(name)
        return default if found is None else found

    def load(self, name: str, allowed: Sequence[str], dtype: torch.dtype, file: str | None = None) -> nn.Module:
        """Load a component on the CPU, in eval mode. No random numbers are drawn.

        allowed: names of the classes that the recipe supports.
        file: single file that contains the component's weights, read instead of the weights in the folder.
        Raises ConfigError if the component is missing, is not of an allowed class, or cannot be loaded.
        """
        found = self.class_of(name)
        if found is None or found not in allowed:
            raise ConfigError(
                f"{self.root / INDEX}: {name} is {found}, but this recipe needs {' or '.join(allowed)}; choose the "
                "recipe for this model's family"
            )
        if file is not None:
            self._require(name)
            return read_single_file(_class(found), Path(file).expanduser(), self.root / name, dtype)
        settings = {"torch_dtype": dtype, "use_safetensors": True, "output_loading_info": True}
        module: nn.Module
        module, info = self._from_pretrained(_class(found), name, **settings)
        require_complete(module, self.root / name, _AGAIN, info["missing_keys"])
        return module.eval()

    def tokenizer(self, name: str) -> Any:
        """Load a tokenizer. Raises ConfigError if it cannot be loaded."""
        from transformers import AutoTokenizer

        return self._from_pretrained(AutoTokenizer, name, trust_remote_code=False)

    def processor(self, name: str) -> Any:
        """Load an image processor. Raises ConfigError if it cannot be loaded."""
        found = self.class_of(name)
        if found is None or "ImageProcessor" not in found:
            raise ConfigError(
                f"{self.root / INDEX}: {name} is {found}, but must be an image processor from transformers; use a "
                "folder written by save_pretrained"
            )
        return self._from_pretrained(_class(found), name)

    def scheduler(self) -> Any:
        """Load the scheduler. Raises ConfigError if it is missing."""
        found = self.class_of("scheduler")
        if found is None or not found.endswith("Scheduler"):
            raise ConfigError(
                f"{self.root / INDEX}: scheduler is {found}, but must be a diffusers scheduler; use a folder written "
                "by save_pretrained"
            )
        return self._from_pretrained(_class(found), "scheduler")

    def _require(self, name: str) -> None:
        # Both libraries take a path that does not exist for an id on the Hugging Face Hub.
        if not (self.root / name).is_dir():
            raise ConfigError(
                f"{self.root} has no {name} folder, but {INDEX} lists this component as "
                f"{self.index.get(name)}; {_AGAIN}"
            )
        for file in sorted((self.root / name).glob(f"*{SAFETENSORS}")):
            if problem := problem_of(file):
                raise ConfigError(problem)

    def _from_pretrained(self, kind: Any, name: str, **settings: Any) -> Any:
        self._require(name)
        with quiet():
            try:
                return kind.from_pretrained(self.root / name, local_files_only=True, **settings)
            except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
                reason = " ".join(str(error).split())[:500].removesuffix(".")
                raise ConfigError(
                    f"cannot load {self.root / name} as {kind.__name__}: {reason}; {_AGAIN}, "
                    "in diffusers' layout and with the weights as safetensors"
                ) from error


def open_folder(model: str, download: bool = False) -> ModelFolder:
    """Open a local folder or, if `download` is True, a pipeline from the Hugging Face Hub.

    Raises ConfigError if the folder does not contain a diffusers pipeline.
    """
    missing = [name for name in ("diffusers", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"this recipe requires {' and '.join(missing)}; run `pip install 'streamvid[recipes]'`")
    root = Path(model).expanduser()
    if not root.is_dir() and download:
        from huggingface_hub import snapshot_download

        root = Path(snapshot_download(model, allow_patterns=[f"**/{one}" for one in _PATTERNS] + list(_PATTERNS)))
    file = root / INDEX
    if root.is_file():
        raise ConfigError(f"model={model!r} is a file; {single_file_remedy(model)}")
    if not file.is_file():
        raise ConfigError(
            f"model={model!r}: {file} does not exist; specify the folder of a diffusers pipeline, such as a download "
            "of Wan-AI/Wan2.1-T2V-1.3B-Diffusers, or its id on the Hugging Face Hub with --set model.args.download=true"
        )
    if file.stat().st_size > _MAX_INDEX_BYTES:
        raise ConfigError(
            f"{file} is larger than {_MAX_INDEX_BYTES} bytes, so it cannot belong to a diffusers pipeline; specify the "
            "folder of a diffusers pipeline"
        )
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"cannot read {file}: {error}; download the model again") from None
    if not isinstance(index, dict):
        raise ConfigError(f"{file} is not a JSON object; download the model again")
    return ModelFolder(root, index)


def _class(name: str) -> Any:
    import diffusers
    import transformers

    for library in (diffusers, transformers):
        if hasattr(library, name):
            return getattr(library, name)
    if name.startswith("LTX2"):  # these classes are exported by their pipeline's module alone
        return getattr(importlib.import_module("diffusers.pipelines.ltx2"), name)
    raise ConfigError(
        f"neither diffusers nor transformers has a class {name}; upgrade both with `pip install --upgrade "
        "'streamvid[recipes]'`"
    )
