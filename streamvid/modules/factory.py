"""Import of objects by path ("package.module:name") from the working directory or installed packages."""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streamvid.errors import ConfigError


def import_object(path: str) -> Any:
    """Import the object at "package.module:name", where name may be dotted.

    The working directory is searched first and stays on `sys.path`, because the module may import other modules later.
    For example, "train:build" is the `build` object in `train.py` in the working directory.
    Raises a ConfigError that names the missing part of the path.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ConfigError(f"{path!r} is not a valid import path; write it as 'package.module:name'")
    if str(Path.cwd()) not in sys.path and "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(_import_problem(path, module_name, error)) from error
    except Exception as error:
        raise ConfigError(
            f"{path}: importing {module_name} failed with {type(error).__name__}: {error}; correct this module"
        ) from error
    try:
        return operator.attrgetter(name)(found)
    except AttributeError:
        public = [key for key in vars(found) if not key.startswith("_")]
        near = difflib.get_close_matches(name, public, n=3) or public[:8]
        where = getattr(found, "__file__", None) or module_name
        raise ConfigError(f"{path}: {where} does not define {name!r}; available: {', '.join(near) or 'none'}") from None


def call_factory(path: str, arguments: Mapping[str, Any], optional: Mapping[str, Any] | None = None) -> Any:
    """Import a factory and call it. Raises ConfigError if the import fails or the arguments do not fit its signature.

    optional: additional arguments, each of which is passed only if the factory has a parameter with this name.
    """
    factory = import_object(path)
    if not callable(factory):
        raise ConfigError(
            f"{path} has type {type(factory).__name__} and cannot be called; specify a function or a class"
        )
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # builtins do not declare their parameters
        return factory(**arguments)
    taken = {name: value for name, value in (optional or {}).items() if name in signature.parameters}
    try:
        bound = signature.bind(**{**taken, **arguments})
    except TypeError as error:
        raise ConfigError(f"cannot call {path} with these arguments: {error}; its signature is {signature}") from None
    return factory(*bound.args, **bound.kwargs)


def _import_problem(path: str, module_name: str, error: ImportError) -> str:
    missing = error.name or ""
    if isinstance(error, ModuleNotFoundError) and (module_name == missing or module_name.startswith(f"{missing}.")):
        return (
            f"{path}: the module {missing!r} is neither installed nor in the working directory {Path.cwd()}; "
            "run the command from the folder that contains it, or install its package"
        )
    return f"{path}: importing {module_name} failed with {type(error).__name__}: {error}; correct this module"
