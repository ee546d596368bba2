"""Name and version of this distribution, and a check that no other package shadows its own.

`data` and `mpu` are common names: a project's own `data` package may come first on the path. Packages that need them
call `check_package_shadowing` on import (an ImportError); commands call it before they import them (one error line).
The packages are looked up without being imported. `megatron` itself is a namespace package, which NVIDIA's
`megatron.core` shares.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from megatron.errors import ConfigError

DISTRIBUTION = "megatron-gpt2-trainer"  # as pip knows it
__version__ = "0.1.0"

# Our top-level packages besides this one, and a module that distinguishes them from others of the same name.
MARKER_MODULES = {"data": "storage", "mpu": "groups"}


class ShadowedPackageError(ConfigError, ImportError):
    """Another package of the same name is found before ours."""


@cache
def check_package_shadowing() -> None:
    for name, module in MARKER_MODULES.items():
        folders, found_at = _find_package(name)
        if not any((folder / f"{module}.py").is_file() for folder in folders):
            root = Path(__file__).resolve().parents[1]
            raise ShadowedPackageError(
                f"the package `{name}` is not found beside {root / 'megatron'}; install this program again, whole"
                if found_at is None else
                f"{found_at} hides the package `{name}` of this program ({root / name}): set PYTHONSAFEPATH=1 (or "
                "start Python with -P), which keeps the current folder off the path; or put "
                f"{root} first in PYTHONPATH; or rename the other {name}")


def _find_package(name: str) -> tuple[list[Path], str | None]:
    """The folders of a package, and what was found under its name."""
    try:
        spec = find_spec(name)
    except ValueError:  # a module without a spec: made by hand, or __main__
        return [], getattr(sys.modules[name], "__file__", None) or f"a module of the name {name}"
    if spec is None:
        return [], None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return folders, spec.origin or (str(folders[0]) if folders else None)
