"""Read the rank's environment, choose its device, join torch's process group and leave it again.

`read_environment` understands the variables of our launcher, torchrun, srun and mpirun without torch, so flags are
checked against the number of ranks in milliseconds. A job of one rank needs no process group.
Not here: subgroups (mpu/groups.py), collectives (mpu/collectives.py), starting ranks (megatron/launch).
"""

from __future__ import annotations

import atexit
import errno
import importlib
import os
import re
import resource
import socket
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.distributed.preflight import check_ranks_match, code_digest
from megatron.distributed.rank_status import RUNNING, START_UP, STATUS, STATUS_FILE_VARIABLE
from megatron.errors import ConfigError, PeerError
from megatron.package import __version__

if TYPE_CHECKING:
    import torch
    import torch.distributed

DEFAULT_TIMEOUT_SECONDS = 600.0
RETRY_SECONDS, MAX_RETRY_SECONDS = 0.2, 2.0  # first and longest pause between attempts to reach rank 0
BACKENDS = ("nccl", "gloo")
LOOPBACK = ("127.0.0.1", "localhost")
PCI, ROUTES = Path("/sys/bus/pci/devices"), Path("/proc/net/route")
RENDEZVOUS_VARIABLES = ("MASTER_PORT", "GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT")  # set by us if they are unset
# Why rank 0 cannot listen; torch's message contains the errno's name.
PORT_REFUSALS = {errno.EADDRINUSE: "is in use: another job or program listens there",
                 errno.EACCES: "needs the rights of root: ports below 1024 do"}
# Set by launchers that give all ranks of a node one environment, and so one CUDA_VISIBLE_DEVICES.
NODE_LAUNCHER_VARIABLES = ("MEGATRON_LAUNCHER", "TORCHELASTIC_RUN_ID")
LAUNCHER_VARIABLES: tuple[tuple[str, tuple[str, ...], str, tuple[str, ...]], ...] = (
    # rank, world size (first name that is set), local rank, ranks on this node (first name that is set)
    ("RANK", ("WORLD_SIZE",), "LOCAL_RANK", ("LOCAL_WORLD_SIZE",)),
    # Step variables first: in a batch script outside srun, SLURM_NTASKS counts tasks that were not started.
    ("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID",
     ("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")),
    ("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_RANK", ("OMPI_COMM_WORLD_LOCAL_SIZE",)),
)


class CallbackList:
    """Methods to call once, while their objects live."""

    def __init__(self) -> None:
        self._methods: list[weakref.WeakMethod[Callable[[], None]]] = []

    def register(self, callback: Callable[[], None]) -> None:
        self._methods.append(weakref.WeakMethod(callback))

    def run(self) -> None:
        """Call and remove each method, the last one first."""
        while self._methods:
            method = self._methods.pop()()
            if method is not None:
                method()


# Callbacks of this process; module state, since the process group belongs to the process too.
BEFORE_SHUTDOWN = CallbackList()  # before this process leaves the process group after success
AFTER_SHUTDOWN = CallbackList()  # after a successful `shutdown`; may take long, but not if `is_stop_requested`
_STOP_CHECKS: list[weakref.WeakMethod[Callable[[], bool]]] = []
_EARLY_EXIT_HANDLERS: list[Callable[[], None]] = []
before_shutdown, after_shutdown = BEFORE_SHUTDOWN.register, AFTER_SHUTDOWN.register


@dataclass(frozen=True)
class Environment:
    """This process's rank and the sizes of its job; the default is a job of one rank."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1


def read_environment(environ: Mapping[str, str] = os.environ) -> Environment:
    """This process's rank and the sizes of its job; without a launcher, a job of one rank. Raises ConfigError."""
    for rank_name, world_names, local_name, local_world_names in LAUNCHER_VARIABLES:
        world_name = next((name for name in world_names if name in environ), None)
        if rank_name not in environ and world_name is None:
            continue
        if rank_name not in environ or world_name is None:
            if rank_name.startswith("SLURM"):
                continue  # inside an allocation, but not started by srun
            have, lack = (rank_name, world_names[0]) if rank_name in environ else (world_name, rank_name)
            raise ConfigError(f"environment: {have} is set but {lack} is not; set both, or start with megatron.launch")
        rank, world = _integer_variable(environ, rank_name), _integer_variable(environ, world_name)
        local_world_name = next((name for name in local_world_names if name in environ), None)
        # Without a number of ranks per node, all ranks are on this one.
        local_world = _integer_variable(environ, local_world_name) if local_world_name else world
        local = _integer_variable(environ, local_name) if local_name in environ else rank % max(1, local_world)
        if not rank < world:
            raise ConfigError(f"environment: {rank_name} is {rank} but {world_name} is {world}; "
                              f"expected a rank from 0 to {world - 1}")
        return Environment(rank, local, world, local_world)
    return Environment()


def _integer_variable(environ: Mapping[str, str], name: str) -> int:
    # Slurm writes "4(x2)": four tasks on each of two nodes.
    match = re.fullmatch(r"(\d+)(\(x\d+\))?(,.*)?" if name.startswith("SLURM") else r"(\d+)", environ[name].strip())
    if match is None:
        raise ConfigError(f"environment: {name} is {environ[name]!r}; expected a number, 0 or more")
    return int(match[1])


def device_for(env: Environment, backend: str | None = None) -> torch.device:
    """The device of this rank: its own GPU (number 0 if Slurm shows each rank only its own), or the CPU. Ranks may
    share a GPU only with gloo. `backend` None takes that of the existing process group."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    if backend is None and torch.distributed.is_initialized():
        from mpu.groups import backend_by_device

        world = torch.distributed.group.WORLD
        assert world is not None, "it is initialized"
        backend = backend_by_device(world).get("cuda")
    # Does the one visible GPU belong to this rank alone? Slurm gave each task one, or a wrapper set another
    # CUDA_VISIBLE_DEVICES per rank. (A node launcher sets one list for all ranks, and a lone `0` may be such a list.)
    sees_only_its_own_gpu = count == 1 and not any(name in os.environ for name in NODE_LAUNCHER_VARIABLES) and (
        "SLURM_GPUS_PER_TASK" in os.environ or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
        or os.environ.get("CUDA_VISIBLE_DEVICES", "0") != "0")
    if env.local_rank >= count and backend != "gloo" and not sees_only_its_own_gpu:
        raise ConfigError(
            f"rank {env.rank} needs GPU {env.local_rank}, but this node has {count}: start at most {count} ranks per "
            "node, or set CUDA_VISIBLE_DEVICES= (empty) and run on the CPU")
    return torch.device("cuda", env.local_rank % count)


def bind_to_cpus_of(device: torch.device) -> None:
    """Run this thread, and threads that it starts, on the CPUs of the GPU's NUMA node, unless an affinity was given."""
    import torch

    gpu: Any = torch.cuda.get_device_properties(device)  # torch does not declare all of them
    address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
    with suppress(OSError, ValueError):  # a virtual machine may hide the topology
        ranges = (PCI / address / "local_cpulist").read_text().strip().split(",")  # "0-3,8"
        first_and_last = [(int(part.split("-")[0]), int(part.split("-")[-1])) for part in ranges]
        if len(os.sched_getaffinity(0)) == os.cpu_count():
            os.sched_setaffinity(0, [cpu for first, last in first_and_last for cpu in range(first, last + 1)])


@contextmanager
def restore_variables_on_error() -> Iterator[None]:
    """Unset variables that the body set for a rendezvous that failed: the next one may use another port or address."""
    unset = [name for name in RENDEZVOUS_VARIABLES if name not in os.environ]
    try:
        yield
    except BaseException:
        for name in unset:
            os.environ.pop(name, None)
        raise


@restore_variables_on_error()
def init_process_group(env: Environment | None = None, backend: str | None = None,
                       timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS, *, init_method: str | None = None,
                       even_for_one_rank: bool = False, must_match: Mapping[str, Any] | None = None) -> Environment:
    """Choose this rank's device and create torch's default process group; returns `env` (default: as launched).
    Idempotent. A single rank creates one only with `even_for_one_rank`. `backend` None means nccl with GPUs, gloo
    without; `timeout_seconds` limits the wait for a silent peer; `init_method` is torch's; `must_match` are settings
    that must be equal on all ranks (preflight.py)."""
    import torch

    env = env or read_environment()
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"--distributed-backend is {backend!r}; expected one of {', '.join(BACKENDS)}")
    if timeout_seconds <= 0:
        raise ConfigError(f"--distributed-timeout-seconds is {timeout_seconds:g}; expected more than 0")
    device = device_for(env, backend)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if env.local_world_size == torch.cuda.device_count() > 1:  # otherwise ranks may be near the same CPUs
            bind_to_cpus_of(device)
    elif backend == "nccl":
        raise ConfigError("--distributed-backend nccl needs a GPU, but torch sees none; leave the flag out or use gloo")
    if env.world_size > 1:
        publish_status(env)
    if torch.distributed.is_initialized():  # by the script
        register_shutdown_at_exit()
        return env
    if env.world_size == 1 and not even_for_one_rank:
        return env
    register_shutdown_at_exit()
    raise_open_file_limit()
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # gloo connects only pairs that communicate
    chosen = backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=timeout_seconds)
    if env.world_size == 1:
        torch.distributed.init_process_group(chosen, store=torch.distributed.HashStore(), rank=0, world_size=1,
                                             timeout=timeout)
        return env
    if init_method not in (None, "env://"):
        torch.distributed.init_process_group(chosen, init_method=init_method, rank=env.rank,
                                             world_size=env.world_size, timeout=timeout)
        return env
    try:
        with STATUS.in_activity(f"{START_UP}, meeting the other ranks"):
            _rendezvous(env, timeout, chosen, device, must_match)
    except (OSError, RuntimeError) as error:
        for number, why in PORT_REFUSALS.items():
            if isinstance(error, OSError) and error.errno == number or errno.errorcode[number] in str(error):
                raise ConfigError(
                    f"the ranks cannot meet: port {os.environ.get('MASTER_PORT')} of rank 0's node {why}; choose a "
                    "free one with --master-port of megatron.launch, or in MASTER_PORT, the same on every node"
                ) from error
        raise
    return env


def publish_status(env: Environment | None = None) -> None:
    """Publish this rank's status to our launcher, if there is one. Idempotent; does not import torch."""
    path = os.environ.get(STATUS_FILE_VARIABLE)
    STATUS.publish_in(path, (env or read_environment()).local_rank)
    if STATUS.snapshot.state != RUNNING:  # also for a second program in this process
        STATUS.set_activity("")
        STATUS.mark_running()
    if "torch" in sys.modules:
        importlib.import_module("mpu.collective_tracker").write_counters_to(STATUS.collective_counters)


def _rendezvous(env: Environment, timeout: timedelta, backend: str, device: torch.device,
                must_match: Mapping[str, Any] | None) -> None:
    import torch

    from mpu import collective_tracker

    collective_tracker.mark_waiting()
    try:
        store = _open_store(env, timeout)
        settings = {**(must_match or {}), "version": __version__, "code": code_digest(), "torch": torch.__version__,
                    "backend": backend}
        check_ranks_match(torch.distributed.PrefixStore("preflight", store), env.rank, env.world_size, settings,
                          timeout)
        torch.distributed.init_process_group(
            backend, store=store, rank=env.rank, world_size=env.world_size, timeout=timeout,
            # Naming the device lets NCCL connect here, where a failure is easy to place, not in the first step.
            device_id=device if backend == "nccl" else None)
    finally:
        collective_tracker.mark_idle()


def is_rendezvous_error(error: BaseException) -> bool:
    """Whether `error` was raised inside `_rendezvous`. A flag would go stale if a script catches the error."""
    return any(frame.f_code is _rendezvous.__code__ for frame, _ in traceback.walk_tb(error.__traceback__))


def raise_open_file_limit() -> None:
    """Allow a connection to every other rank or node: the default limit is too low from about 1,000 on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS names a limit that it does not grant
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open_store(env: Environment, timeout: timedelta) -> torch.distributed.Store:
    """The rendezvous store: our launcher's file, or a TCPStore at rank 0's address."""
    import torch.distributed as dist

    path = os.environ.get("MEGATRON_STORE_FILE")
    if path:
        store: dist.Store = dist.FileStore(path, env.world_size)
        store.set_timeout(timeout)
        return store
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(
            f"environment: {env.world_size} ranks cannot meet without {' and '.join(missing)}; set the address of rank "
            "0's node and a free port there (docs/launch.md), or start with megatron.launch")
    address, port = os.environ["MASTER_ADDR"], _integer_variable(os.environ, "MASTER_PORT")
    if address in LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    elif env.world_size > env.local_world_size and (name := interface_towards(address)):
        # by itself gloo takes the interface of this machine's name, which on many systems is the loopback interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun serves it
        agent_store: dist.Store = next(dist.rendezvous("env://", env.rank, env.world_size, timeout=timeout))[0]
        agent_store.set_timeout(timeout)
        # torchrun's store keeps the keys of ranks from before a restart (--max-restarts).
        return dist.PrefixStore(f"restart{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", agent_store)
    # No waiting for missing ranks here: preflight.py waits, and names them.
    tcp = partial(dist.TCPStore, address, port, None, env.rank == 0, timeout, wait_for_workers=False)
    if env.rank > 0:
        _wait_for_port(address, port, timeout.total_seconds())
        try:
            return tcp()
        except RuntimeError as error:
            raise PeerError(
                f"what answers at {address}:{port} is not rank 0 ({str(error).splitlines()[0]}): another program "
                "listens there, or rank 0 has left; look for its error, or choose a free MASTER_PORT") from error
    if address not in LOOPBACK:
        return tcp()
    # TCPStore listens on every interface even for 127.0.0.1, unless it is handed a socket that is bound already.
    listener = socket.create_server((address, port), backlog=max(128, env.world_size))
    return tcp(master_listen_fd=listener.detach())


def interface_towards(address: str) -> str | None:
    """The network interface on the route to an IPv4 address or name; for a loopback address the default route's."""
    found = []
    with suppress(OSError):
        (target,) = struct.unpack("=I", socket.inet_aton(socket.gethostbyname(address)))
        for line in ROUTES.read_text().splitlines()[1:]:
            name, destination, _, _, _, _, metric, mask, *_ = line.split()
            if target & int(mask, 16) == int(destination, 16):
                found.append((int(mask, 16).bit_count(), -int(metric), name))
    return max(found)[-1] if found else None


def try_connect(address: str, port: int, seconds: float) -> socket.socket | str:
    """A connection, or the reason why there is none yet."""
    try:
        connection = socket.create_connection((address, port), max(0.1, min(5.0, seconds)))
        if connection.getsockname() != connection.getpeername():
            return connection
        connection.close()
        return "nothing listens there"  # a self-connect: the kernel chose the target port as source port
    except OSError as error:
        return error.strerror or str(error)


def _wait_for_port(address: str, port: int, seconds: float) -> None:
    """Wait until rank 0 listens; PeerError after `seconds`. torch would retry silently and print its own stack."""
    until, pause = time.monotonic() + seconds, RETRY_SECONDS
    while True:
        connection = try_connect(address, port, until - time.monotonic())
        if isinstance(connection, socket.socket):
            connection.close()
            return
        if time.monotonic() + pause >= until:
            raise PeerError(
                f"rank 0 did not answer at {address}:{port} within {seconds:g} s ({connection}): look for its "
                "error, and whether all ranks were started with the same MASTER_ADDR and MASTER_PORT")
        time.sleep(pause)
        pause = min(1.5 * pause, MAX_RETRY_SECONDS)


def hosts_store(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the store ends with this process: it is neither our launcher's file nor served by torchrun."""
    outlives = "MEGATRON_STORE_FILE" in environ or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return read_environment(environ).rank == 0 and not outlives


def rank_0_printer(rank: int) -> Callable[[str], None]:
    """A function that prints a line to stderr on rank 0 only."""
    def print_line(line: str) -> None:
        if rank == 0:
            print(line, file=sys.stderr, flush=True)
    return print_line


def register_stop_check(check: Callable[[], bool]) -> None:
    """Set the method that `is_stop_requested` calls while its object lives."""
    _STOP_CHECKS[:] = [weakref.WeakMethod(check)]


def is_stop_requested() -> bool:
    """Whether this process should exit soon: work that the next start can repeat is skipped."""
    return any(check() for method in _STOP_CHECKS if (check := method()) is not None)


def run_shutdown_callbacks() -> None:
    """Run the shutdown callbacks once, for a process that exits without destructors."""
    BEFORE_SHUTDOWN.run()
    AFTER_SHUTDOWN.run()


def on_early_exit(handler: Callable[[], None]) -> None:
    """Register a handler for scripts that exit with code 0 in the middle of a step."""
    if handler not in _EARLY_EXIT_HANDLERS:
        _EARLY_EXIT_HANDLERS.append(handler)


@cache
def register_shutdown_at_exit() -> None:
    """Run `shutdown` at exit, also for a process group that the script created. Idempotent."""
    # This module's default arguments would hold the default group alive after `shutdown`; imported before the group
    # exists, they hold None.
    importlib.import_module("torch.distributed.nn.functional")
    atexit.register(_shutdown_at_exit)


def _shutdown_at_exit() -> None:
    """Shut down for scripts that simply end: a C++ thread would abort an interpreter that is finalizing. After an error
    the group stays, since destroying it could wait for a lost peer."""
    failed = sys.exc_info()[0] is not None or getattr(sys, "last_value", None) is not None
    for handler in _EARLY_EXIT_HANDLERS if STATUS.snapshot.is_mid_operation and not failed else ():
        handler()
    with suppress(KeyboardInterrupt):  # Ctrl-C: the remaining work is left to the next start
        BEFORE_SHUTDOWN.run() if failed else shutdown()


def shutdown() -> None:
    """Leave the process group after success. After a failure call `exit_codes.exit_now` instead: this could hang. Slow
    callbacks run after the group is gone, because ranks that destroy their group wait for each other."""
    import torch

    BEFORE_SHUTDOWN.run()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    AFTER_SHUTDOWN.run()
    STATUS.mark_done()
