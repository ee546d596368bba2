"""Start the ranks of one node: `python -m megatron.launch [options] (script.py | -m module) arguments...`

Each rank gets the variables that torchrun sets. On one node the ranks connect through a file in memory and over
loopback. A single rank on a single node replaces the launcher's own process. Standard library only.
Not here: watching the ranks (supervisor.py), reading the variables (megatron/distributed/process_group.py).
Why torchrun is not enough: docs/decisions/001-own-launcher.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import NoReturn

from megatron.distributed.exit_codes import prepare_streams
from megatron.distributed.rank_status import STATUS_FILE_VARIABLE, StragglerMonitor
from megatron.distributed.signals import write_stderr
from megatron.errors import EXIT_PEER, ConfigError, TrainerError
from megatron.launch.node_monitor import NodeInfo, NodeMonitor
from megatron.launch.rendezvous import meet_nodes
from megatron.launch.supervisor import Supervisor

DEFAULT_PORT = 29500
RENDEZVOUS_SECONDS = 600.0
# Variables of each rank, unless they are set.
DEFAULT_VARIABLES = {
    "PYTHONFAULTHANDLER": "1",  # a rank that crashes in native code prints the stack of each thread
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # as exit_codes.py does; set here also for scripts that are not ours
    # NCCL's last collectives are kept, and written to a file of each rank when one of them times out.
    "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
OPTIONS_WITHOUT_VALUE = ("-h", "--help", "-m", "--module")


def create_memory_file(name: str) -> str:
    """The path of a new empty file in memory, for the ranks. It needs no disk, and is gone when this process ends."""
    return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"


def build_launcher_parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [options] (script.py | -m module) [arguments of the script or module...]"
    typed = os.path.basename(sys.argv[0])  # as data.cli.command_name; `data` is not checked yet
    prog = typed if typed.startswith("gpt2-") else "python -m megatron.launch"
    p = argparse.ArgumentParser(prog=prog, usage=usage, allow_abbrev=False)

    def raise_usage_error(message: str) -> NoReturn:
        raise ConfigError(f"launcher: {message}; see {prog} --help")

    p.error = raise_usage_error  # type: ignore[method-assign]
    p.add_argument("-m", "--module", action="store_true",
                   help="run an installed module in place of a script, as `python -m` does")
    p.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks on this node, one per GPU (1)")
    p.add_argument("--nnodes", type=int, default=1, metavar="N", help="nodes of the job (1)")
    p.add_argument("--node-rank", type=int, default=0, metavar="R", help="number of this node, from 0 (0)")
    p.add_argument("--master-addr", metavar="A", help="address of node 0; needed with several nodes")
    p.add_argument("--master-port", type=int, metavar="P", help=f"free port on node 0 ({DEFAULT_PORT})")
    p.add_argument("--meeting-timeout-seconds", type=float, default=RENDEZVOUS_SECONDS, metavar="S",
                   help=f"how long nodes wait for each other before a rank is started ({RENDEZVOUS_SECONDS:g})")
    return p


def split_command_line(argv: list[str]) -> tuple[list[str], list[str]]:
    """(launcher options, command): the script or module with its arguments is passed on unchanged, `--` included."""
    options: list[str] = []
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        name, equals, value = argv[at].partition("=")
        flag = name.replace("_", "-")  # torchrun spells its options with underscores
        values = 0 if equals or flag in OPTIONS_WITHOUT_VALUE else 1
        options += [flag + equals + value, *argv[at + 1:at + 1 + values]]
        at += 1 + values
    return options, argv[at:]


def check_options(options: argparse.Namespace, command: list[str]) -> None:
    if not command:
        raise ConfigError("launcher: no script given; expected: python -m megatron.launch [options] script.py [...], "
                          "or -m module [...]")
    if options.module and not is_runnable_module(command[0]):
        raise ConfigError(f"launcher: {sys.executable} finds no module {command[0]!r} to run; install it there, or "
                          "give the path of a script without -m")
    if not options.module and not os.path.isfile(command[0]):
        name = Path(command[0]).stem
        remedy = (f"the module of that name is installed: start it with -m {name}" if is_runnable_module(name)
                  else "give the path of a Python script, or -m and the name of an installed module")
        raise ConfigError(f"launcher: script {command[0]!r} is not a file; {remedy}")
    for flag in ("nproc_per_node", "nnodes"):
        if getattr(options, flag) < 1:
            raise ConfigError(f"launcher: --{flag.replace('_', '-')} is {getattr(options, flag)}; expected 1 or more")
    if not 0 <= options.node_rank < options.nnodes:
        raise ConfigError(f"launcher: --node-rank {options.node_rank} does not fit --nnodes {options.nnodes}; "
                          f"expected 0 to {options.nnodes - 1}")
    if options.master_port is not None and not 0 < options.master_port < 65536:
        raise ConfigError(f"launcher: --master-port {options.master_port} is not a port; expected 1 to 65535")
    if not 0 < options.meeting_timeout_seconds < float("inf"):
        raise ConfigError(f"launcher: --meeting-timeout-seconds is {options.meeting_timeout_seconds:g}; expected more "
                          "than 0")
    if options.nnodes > 1 and not options.master_addr:
        raise ConfigError("launcher: --nnodes is above 1 but --master-addr is missing; give the address of node 0")


def is_runnable_module(module: str) -> bool:
    """Whether `python -m MODULE` can run it; imports only the parent packages."""
    try:
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{module}.__main__")
    except (ImportError, ValueError):  # a parent package is missing, or this is not the name of a module
        return False
    return spec is not None


def shared_environment(options: argparse.Namespace, store_file: str | None) -> dict[str, str]:
    """The environment variables common to all ranks of this node."""
    port = options.master_port or DEFAULT_PORT
    if store_file and not options.master_port:  # for scripts with their own rendezvous; ours needs no port on one node
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    environment = dict(
        DEFAULT_VARIABLES | os.environ, WORLD_SIZE=str(options.nnodes * options.nproc_per_node),
        LOCAL_WORLD_SIZE=str(options.nproc_per_node), MASTER_ADDR=options.master_addr or "127.0.0.1",
        MASTER_PORT=str(port), MEGATRON_LAUNCHER=str(os.getpid()))
    # Otherwise each rank starts one thread per core, and N ranks compete for them.
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // options.nproc_per_node)))
    environment.pop("MEGATRON_STORE_FILE", None)
    if store_file:
        environment["MEGATRON_STORE_FILE"] = store_file
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
    return environment


def launch_ranks(options: argparse.Namespace, command: list[str]) -> int:
    module_options = ["-P", "-m"] if sys.flags.safe_path else ["-m"]  # -P keeps the current folder off sys.path
    rank_argv = [sys.executable, *(module_options if options.module else []), *command]
    if options.nnodes * options.nproc_per_node == 1:
        # the only rank replaces this process; a batch system may have set other rank variables
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        for name in ("MEGATRON_STORE_FILE", STATUS_FILE_VARIABLE):
            os.environ.pop(name, None)
        os.environ.update(DEFAULT_VARIABLES | os.environ)
        os.execv(sys.executable, rank_argv)
    store_file = create_memory_file("megatron-store") if options.nnodes == 1 else None
    status_path = create_memory_file("megatron-status")
    straggler_monitor = StragglerMonitor(status_path, options.nproc_per_node)
    own = NodeInfo(options.node_rank, options.nnodes, options.nproc_per_node, socket.gethostname())
    nodes = NodeMonitor(own) if own.nodes == 1 else meet_nodes(
        own, options.master_addr, options.master_port or DEFAULT_PORT, options.meeting_timeout_seconds,
        lambda line: write_stderr(f"{line}\n".encode(errors="backslashreplace")))
    shared = {**shared_environment(options, store_file), STATUS_FILE_VARIABLE: status_path}
    first = options.node_rank * options.nproc_per_node
    environments = [{**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)}
                    for local in range(options.nproc_per_node)]
    return Supervisor(rank_argv, environments, nodes, straggler_monitor).run()


def main(argv: list[str]) -> int:
    prepare_streams()
    try:
        head, command = split_command_line(argv)
        options = build_launcher_parser().parse_args(head)
        check_options(options, command)
        return launch_ranks(options, command)
    except TrainerError as error:
        write_stderr(f"error: {error}\n".encode(errors="backslashreplace"))
        return error.code
    except OSError as error:
        write_stderr(f"error: launcher: cannot start the ranks: {error}; check the limits on processes and "
                     "memory\n".encode(errors="backslashreplace"))
        return EXIT_PEER
