"""`python -m megatron.serve`: a trained model behind HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from data.storage import escape_to_one_line
from megatron.config.tree import require
from megatron.errors import ConfigError
from megatron.inference.source import ModelParser, source_of, told
from megatron.launch import distributed
from megatron.launch.signals import StopListener, write_stderr
from megatron.serve import limits
from megatron.serve.door import is_loopback

MODULE = "python -m megatron.serve"
KEY_VARIABLE = "GPT2_SERVE_API_KEY"
STOPPING = b"finishing what is under way (Ctrl-C again ends at once)\n"

EXAMPLES = """examples:
  python -m megatron.serve --load runs/gpt2
  python -m megatron.serve --load runs/gpt2 --host 0.0.0.0 --port 8000 --api-key-file key.txt
  python -m megatron.launch --nproc-per-node 2 -m megatron.serve --load runs/gpt2 --model-parallel-size 2

docs/serve.md explains the rest."""


def build_parser() -> ModelParser:
    parser = ModelParser(MODULE, "A trained GPT-2 behind HTTP: PUT /api, POST /v1/completions, and a page to try it.",
                         EXAMPLES)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1: this machine only)")
    add("--port", type=int, default=5000, metavar="N", help="0: any that is free (5000)")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="on the loopback: a name besides localhost "
        "that requests may be for; may be given again")
    add("--api-key-file", metavar="FILE", help=f"its first line is a key that clients must send; or set {KEY_VARIABLE}")
    add("--model-name", metavar="NAME", help="what clients call the model (the name of its folder)")
    add("--batch-size", type=int, default=8, metavar="N", help="texts at a time (8)")
    add("--quiet", action="store_true", help="no line for each request")
    limits.add_flags(parser)
    return parser


def check(asked: argparse.Namespace) -> None:
    require(0 <= asked.port < 65536, f"--port is {asked.port}: expected 0 to 65535")
    require(asked.batch_size >= 1, f"--batch-size is {asked.batch_size}: expected 1 or more")
    name = asked.model_name
    require(name is None or name.isascii() and name.isprintable() and name.strip() == name != "",
            "--model-name: expected printable ASCII")


def key_of(asked: argparse.Namespace) -> str | None:
    """What clients must send."""
    key, where = os.environ.get(KEY_VARIABLE), KEY_VARIABLE
    if asked.api_key_file is not None:
        where = f"--api-key-file {asked.api_key_file}"
        try:
            key = Path(asked.api_key_file).read_text("utf-8").partition("\n")[0].strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: cannot read: {error}") from error
    require(key is None or key.isascii() and key.isprintable() and " " not in key and key != "",
            f"{where}: expected a key of printable ASCII without spaces")
    return key


def listener_of(host: str, port: int) -> socket.socket:
    """Bound, and not listening yet: a client that comes while the model is loaded is refused, not kept waiting."""
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


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def name_of(asked: argparse.Namespace) -> str:
    folder = Path((asked.load_hf or asked.load).partition(":")[0]).resolve().name
    return asked.model_name or folder.encode("ascii", "replace").decode() or "gpt2"


def main(argv: Sequence[str] | None = None) -> int:
    asked = build_parser().parse_args(sys.argv[1:] if argv is None else argv)
    check(asked)
    model, bounds, key = source_of(asked), limits.limits_of(asked), key_of(asked)
    hears = StopListener(STOPPING, startup_reason="before the model was loaded; start the same command again")
    listens = distributed.read_environment().rank == 0
    with hears.listening() as stop, listener_of(asked.host, asked.port) if listens else nullcontext() as listener:
        from megatron.inference import loading
        from megatron.serve.front import serve, work

        env = distributed.init(must_match=told(asked))
        groups = loading.groups_of(model, env.world_size, MODULE)
        began = time.monotonic()
        loaded = loading.load(model, groups, distributed.device_for(env, None))
        stop.mark_started()
        if listener is None:
            work(loaded, groups, asked.batch_size)
        else:
            say = _say if not asked.quiet else _hush
            _say(f"{loaded.described}, loaded in {time.monotonic() - began:.1f} s")
            if key is None and not is_loopback(asked.host):
                _say(f"listening on {asked.host} without a key: whoever reaches this machine can use the model; "
                     "--api-key-file asks for one")
            serve(loaded, groups, rows=asked.batch_size, name=name_of(asked), listener=listener, host=asked.host,
                  key=key, allowed=asked.allowed_host, limits=bounds, log=say,
                  ready=lambda: print(f"listening on {address_of(listener)}", flush=True),
                  asked_to_stop=lambda: bool(stop))
        distributed.shutdown()
    return 0


def _say(line: str) -> None:
    """Whether or not somebody reads it."""
    write_stderr(f"{escape_to_one_line(line)}\n".encode())


def _hush(line: str) -> None:
    """Of no interest."""
