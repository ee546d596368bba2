"""Where the parameters of `zero.Init` are kept until `zero.initialize`: by its arguments, and its configuration."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from megatron.config import ds_file
from megatron.config.tree import Config
from megatron.errors import ConfigError
from megatron.launch import exits
from megatron.launch.distributed import read_environment
from megatron.zero.api.drives import name_of_command
from megatron.zero.holders import holder_of
from megatron.zero.homes.swapfolder import SwapFolder, close_all, usable
from megatron.zero.initial_params import Depot, Parked

DEVICE, PATH = (f"zero_optimization.offload_param.{key}" for key in ("device", "nvme_path"))


def meanwhile(remote_device: str | None, source: str | os.PathLike[str] | Mapping[str, Any] | None,
              ) -> tuple[str | None, str | None]:
    """(what was asked for: "cpu", "nvme" or None, the folder on the drive)."""
    if remote_device not in (None, "none", "cpu", "nvme"):
        raise ConfigError(f"zero.Init: remote_device is {remote_device!r}; expected None, 'none', 'cpu' or 'nvme'")
    found = None if source is None else ds_file.read(source, "config_dict_or_path")
    device = None if found is None else found.keys.get(DEVICE)
    if found is not None and None not in (remote_device, device) and remote_device != device:
        raise ConfigError(f"zero.Init: remote_device is {remote_device!r}, and {DEVICE} of {found.name} {device!r}; "
                          "leave one of them out")
    asked = device if remote_device is None else remote_device
    if asked != "nvme":
        return (None if asked == "none" else asked), None
    if found is None:
        raise ConfigError("zero.Init: remote_device 'nvme' needs the configuration, which names the drive's folder: "
                          f"give config_dict_or_path= with {PATH}")
    path = found.keys.get(PATH)
    if path is None:
        raise ConfigError(f"zero.Init: remote_device 'nvme' needs {PATH}, which {found.name} does not give: name a "
                          "folder on the drive")
    usable(path, PATH)
    return asked, path


def depot(path: str) -> Depot:
    """A folder of this rank's own below it."""
    exits.before_leaving(close_all)
    return Depot(SwapFolder(path, f"{name_of_command()}-init", read_environment().rank, flag=PATH))


def give_back_freed() -> None:
    """The C library keeps what is freed below something that is in use, and finds it unfit for the next large tensor:
    what has gone would still be charged to us."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # of glibc
        libc.malloc_trim(0)


def notes(model: nn.Module, config: Config, device: str) -> list[str]:
    """Where `zero.Init` was asked to keep parameters, if they live elsewhere from now on. `device` is the engine's."""
    home = config.offload.offload_param_device
    holders = [holder_of(parameter) for parameter in model.parameters()]
    asked = {holder.asked for holder in holders if isinstance(holder, Parked) and holder.asked is not None}
    place = device if home == "none" else home
    return [f" note: zero.Init kept parameters on {other} until now; from here on they are where "
            f"--offload-param-device {home} says" for other in sorted(asked - {place})]
