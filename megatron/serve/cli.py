"""`python -m megatron.serve`: a trained model behind HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data.cli import StrictArgumentParser
from data.storage import escape_to_one_line
from megatron.config.tree import require
from megatron.distributed import process_group
from megatron.distributed.signals import StopListener, write_stderr
from megatron.errors import ConfigError
from megatron.inference.model_args import flags_to_compare, model_parser, model_source_from_args

MODULE = "python -m megatron.serve"
API_KEY_VARIABLE = "GPT2_SERVE_API_KEY"
STOPPING_NOTICE = b"finishing what is under way (Ctrl-C again ends at once)\n"

EXAMPLES = """examples:
  python -m megatron.serve --load runs/gpt2
  python -m megatron.serve --load runs/gpt2 --host 0.0.0.0 --port 8000 --api-key-file key.txt
  python -m megatron.launch --nproc-per-node 2 -m megatron.serve --load runs/gpt2 --model-parallel-size 2

docs/serve.md explains the rest."""


def _limit(default: float | None, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Each field is a flag. None: the positions of the model."""

    max_body_bytes: int = _limit(1 << 20, "largest body of a request (1 MiB)")
    max_header_bytes: int = _limit(16 << 10, "largest head of a request (16 KiB)")
    max_prompt_tokens: int | None = _limit(None, "longest prompt (the model's positions)")
    max_new_tokens: int | None = _limit(None, "most new tokens of a text (the model's positions)")
    max_texts: int = _limit(128, "most texts of a request, prompts times samples (128, or as many as may wait)")
    max_waiting: int = _limit(256, "most texts that wait for their turn; beyond, requests are answered with 503 (256)")
    max_connections: int = _limit(256, "most connections at a time (256)")
    request_seconds: float = _limit(20.0, "time for a request to arrive whole (20)")
    write_seconds: float = _limit(30.0, "time for a client to take what it is sent (30)")
    grace: float = _limit(30.0, "seconds for what is under way once the server is asked to stop (30)")


def limits_from_args(args: argparse.Namespace) -> ServerLimits:
    limits = {field.name: getattr(args, field.name) for field in fields(ServerLimits)}
    for name, value in limits.items():
        least = 0 if name in ("max_waiting", "grace") else 1e-3 if isinstance(value, float) else 1
        require(value is None or least <= value < float("inf"), f"--{name.replace('_', '-')} is {value}: expected "
                f"{'0 or more' if not least else 'more than 0'}")
    capacity = args.max_waiting + args.batch_size
    if args.max_texts is None:
        limits["max_texts"] = min(ServerLimits.max_texts, capacity)
    require(limits["max_texts"] <= capacity, f"--max-texts {args.max_texts} is more than --max-waiting and "
            f"--batch-size have room for together, {capacity}: such a request could never be taken")
    return ServerLimits(**limits)


def build_parser() -> StrictArgumentParser:
    parser = model_parser(
        MODULE, "A trained GPT-2 behind HTTP: PUT /api, POST /v1/completions, and a page to try it.", EXAMPLES)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=5000, metavar="N", help="0: any that is free (5000)")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="on the loopback: a name besides localhost "
        "that requests may be for; may be given again")
    add("--api-key-file", metavar="FILE",
        help=f"its first line is a key that clients must send; or set {API_KEY_VARIABLE}")
    add("--model-name", metavar="NAME", help="what clients call the model (the name of its folder)")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time (8)")
    add("--quiet", action="store_true", help="no line for each request")
    group = parser.add_argument_group("limits")
    for limit in fields(ServerLimits):
        is_seconds = isinstance(limit.default, float)
        group.add_argument(f"--{limit.name.replace('_', '-')}", type=float if is_seconds else int,
                           default=None if limit.name == "max_texts" else limit.default,
                           metavar="S" if is_seconds else "N", help=limit.metadata["help"])
    return parser


def check_args(args: argparse.Namespace) -> None:
    require(find_spec("uvicorn") is not None, f"{MODULE} needs uvicorn: pip install uvicorn (the extra [serve])")
    require(0 <= args.port < 65536, f"--port is {args.port}: expected 0 to 65535")
    require(args.batch_size >= 1, f"--batch-size is {args.batch_size}: expected 1 or more")
    name = args.model_name
    require(name is None or name.isascii() and name.isprintable() and name.strip() == name != "",
            "--model-name: expected printable ASCII")


def read_api_key(args: argparse.Namespace) -> str | None:
    key, where = os.environ.get(API_KEY_VARIABLE), API_KEY_VARIABLE
    if args.api_key_file is not None:
        where = f"--api-key-file {args.api_key_file}"
        try:
            key = Path(args.api_key_file).read_text("utf-8").partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: cannot read: {error}") from error
    require(key is None or key.isascii() and key.isprintable() and " " not in key and key != "",
            f"{where}: expected a key of printable ASCII without spaces")
    return key


def bind_listener(host: str, port: int) -> socket.socket:
    """A socket that is bound but does not listen: clients are refused, not kept waiting, until the model is loaded."""
    bare = host.removeprefix("[").removesuffix("]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(bare, port, type=socket.SOCK_STREAM,
                                                                flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}, port {port}: {reason}; choose another with --host and --port "
                          "(0: any that is free)") from error
    return listener


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    check_args(args)
    source, server_limits, key = model_source_from_args(args), limits_from_args(args), read_api_key(args)
    stop_handler = StopListener(STOPPING_NOTICE,
                                startup_reason="before the model was loaded; start the same command again")
    is_listener = process_group.read_environment().rank == 0
    with stop_handler.listening() as stop, \
            bind_listener(args.host, args.port) if is_listener else nullcontext() as listener:
        from megatron.inference import load
        from megatron.serve.app import AuthPolicy, is_loopback, run_server
        from megatron.serve.scheduler import run_worker

        env = process_group.init_process_group(must_match=flags_to_compare(args))
        groups = load.build_groups(source, env.world_size, MODULE)
        start = time.monotonic()
        loaded = load.load_model(source, groups, process_group.device_for(env, None))
        stop.mark_started()
        if listener is None:
            run_worker(loaded.generator(args.batch_size), groups.world)
        else:
            folder = Path((args.load_hf or args.load).partition(":")[0]).resolve().name
            name = args.model_name or folder.encode("ascii", "replace").decode() or "gpt2"
            host, port = listener.getsockname()[:2]
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
            _log_to_stderr(f"{loaded.description}, loaded in {time.monotonic() - start:.1f} s")
            if key is None and not is_loopback(args.host):
                _log_to_stderr(f"listening on {args.host} without a key: everyone who reaches this machine can use "
                               "the model; --api-key-file asks for one")
            run_server(loaded, groups, rows=args.batch_size, name=name, listener=listener,
                       auth=AuthPolicy(args.host, key, args.allowed_host), limits=server_limits,
                       log=(lambda line: None) if args.quiet else _log_to_stderr,
                       on_ready=lambda: print(f"listening on {url}", flush=True),
                       stop_requested=lambda: bool(stop))
        process_group.shutdown()
    return 0


def _log_to_stderr(line: str) -> None:
    """Does not raise if standard error is closed."""
    write_stderr(f"{escape_to_one_line(line)}\n".encode())
