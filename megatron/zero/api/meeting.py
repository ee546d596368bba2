"""`zero.init_distributed`: meet the other ranks as a DeepSpeed script asks for it. The work is launch/distributed.py's.

After it torch.distributed has a process group on any number of ranks, one included, and the environment has RANK,
LOCAL_RANK and WORLD_SIZE: scripts ask either for their place.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from megatron.errors import ConfigError
from megatron.launch import distributed, exits
from megatron.launch.distributed import DEFAULT_TIMEOUT_SECONDS, Environment

DEFAULT_PORT = 29500
FOREIGN_LAUNCHERS = ("SLURM_", "OMPI_")


def init_distributed(dist_backend: str | None = None, auto_mpi_discovery: bool = True,
                     distributed_port: int = DEFAULT_PORT, verbose: bool = True,
                     timeout: timedelta | float | None = None, init_method: str | None = None,
                     dist_init_required: bool | None = None, config: Any = None, rank: int = -1,
                     world_size: int = -1) -> None:
    """Meet the other ranks that a launcher started; may be called again.

    `rank` and `world_size` say it where no launcher does; `distributed_port` counts where MASTER_PORT is not set, and
    `init_method` (torch's) in place of both. Slurm's and OpenMPI's variables count unless `auto_mpi_discovery` is off.
    `timeout` (a timedelta, or seconds) is how long to wait for a silent peer. `verbose` and `config` change nothing:
    the meeting has nothing to print, and no settings of its own. With `dist_init_required=False` the script has met
    already.
    """
    exits.answer_uncaught()
    if dist_init_required is False:
        return
    env = _place(rank, world_size, auto_mpi_discovery)
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    with distributed.setting_variables():
        if env.world_size > 1 and "MEGATRON_STORE_FILE" not in os.environ:
            os.environ.setdefault("MASTER_PORT", str(distributed_port))
        distributed.init_process_group(env, dist_backend, DEFAULT_TIMEOUT_SECONDS if seconds is None else seconds,
                                       init_method=init_method, also_alone=True)
    _tell(env)


def _tell(env: Environment) -> None:
    """The place as torchrun's variables, where the launcher (or none) set others: `read_environment` finds the same."""
    for name, number in (("RANK", env.rank), ("LOCAL_RANK", env.local_rank), ("WORLD_SIZE", env.world_size),
                         ("LOCAL_WORLD_SIZE", env.local_world_size)):
        os.environ.setdefault(name, str(number))


def _place(rank: int, world_size: int, any_launcher: bool) -> Environment:
    """This rank's place: a launcher's, or the given one; both must agree."""
    environ = {name: value for name, value in os.environ.items()
               if any_launcher or not name.startswith(FOREIGN_LAUNCHERS)}
    given = {name: number for name, number in (("RANK", rank), ("WORLD_SIZE", world_size)) if number >= 0}
    for name, number in given.items():
        if environ.setdefault(name, str(number)) != str(number):
            raise ConfigError(f"init_distributed: {name.lower()} is {number}, but the launcher set {name} to "
                              f"{environ[name]}; leave the argument out")
    return distributed.read_environment(environ)
