"""A run's flags in a YAML or TOML file: `--config run.yaml` reads them, `--print-config yaml` writes them.

    preset: 124M            # --preset 124M
    train_data: [a, b]      # --train-data a b
    bf16: true              # --bf16; false is --no-bf16
    lr: 6e-4

Names are those of the flags, with dashes or underscores. There are no sections; null leaves a setting out.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from data.cli import suggest_spelling
from megatron.config.schema import ErrorList
from megatron.config.tree import Config
from megatron.errors import ConfigError

FORMATS = ("yaml", "toml")


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return tomllib.loads(text)
    import yaml  # here, since --help needs no package

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        settings = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ValueError(error) from None
    names = [key.value for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]  # of which YAML would keep the last
    if twice:
        raise ConfigError(f"{', '.join(twice)} is given twice; keep one")
    return settings


def read_config_file(path: str, known: Collection[str]) -> list[str]:
    """The words of the command line that the file stands for. `known` are the flags that it may set. Raises a
    ConfigError that does not name the file."""
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        settings = _parse(Path(path), text)
    except ValueError as error:  # tomllib's is one
        kind = "TOML" if path.endswith(".toml") else "YAML"
        raise ConfigError(f"no valid {kind}: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise ConfigError("expected names and values, as in `lr: 6e-4`")
    words, errors, seen = list[str](), ErrorList(), set[str]()
    for name, value in settings.items():
        flag = f"--{str(name).replace('_', '-')}"
        if flag in seen:
            errors.append(f"{name} is given twice, with dashes and with underscores; keep one")
        elif isinstance(value, dict):
            errors.append(f"{name} is a section: write the names of flags without sections, as in `lr: 6e-4`")
        elif flag not in known:
            hint = suggest_spelling(flag, known).replace("--", "").replace("-", "_")
            errors.append(f"unknown name {name}: {hint or 'the names are those of the flags (--help-all)'}")
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif value is not None:
            words.append(f"{flag}={str(value).lower() if isinstance(value, bool) else value}")
        seen.add(flag)
    errors.raise_if_any()
    return words


def config_as_text(config: Config, file_format: str) -> str:
    """The file that gives this Config, with every setting that has a value."""
    lines = ["# Every setting of a run, for --config."]
    for section, settings in config.as_dict().items():
        lines += ["", f"# {section}"]
        # A JSON value is also one of YAML and TOML.
        lines += [f"{name}{': ' if file_format == 'yaml' else ' = '}{json.dumps(value, ensure_ascii=False)}"
                  for name, value in settings.items() if value not in (None, [])]
    return "\n".join(lines)
