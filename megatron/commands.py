"""The console commands of an installation (`setup.cfg`): what `python -m` starts, as `gpt2-train`, `gpt2-launch`, ...

Each returns its exit code and also knows `--version`. Nothing is imported before the command is known to be ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module

from megatron.distributed.exit_codes import prepare_streams, run, run_command, write_error
from megatron.distributed.signals import exit_on_stop_signal
from megatron.package import DISTRIBUTION, ShadowedPackageError, __version__, check_package_shadowing


def _command(start: Callable[[], int]) -> Callable[[], int]:
    """`start`, unless the version is asked for or a package of ours is hidden."""
    @wraps(start)
    def command() -> int:
        prepare_streams()
        exit_on_stop_signal()  # until the command listens by itself
        if sys.argv[1:] == ["--version"]:
            return run(lambda: print(f"{DISTRIBUTION} {__version__}"))
        try:
            check_package_shadowing()
        except ShadowedPackageError as hidden:
            write_error(str(hidden))
            return hidden.code
        return start()
    return command


@_command
def train() -> int:
    from pretrain_gpt2 import program
    return program()


@_command
def launch() -> int:
    from megatron.launch.launcher import main
    return main(sys.argv[1:])


def _command_of(module: str) -> Callable[[], int]:
    return _command(lambda: run_command(module))


checkpoint = _command_of("megatron.checkpoint.cli")
plan = _command_of("megatron.plan.cli")
generate = _command_of("megatron.inference.cli")
evaluate = _command_of("megatron.evaluate.cli")
serve = _command_of("megatron.serve.cli")
report = _command_of("megatron.report.run_report")
tune = _command_of("megatron.tune.cli")


def _data_command(module: str) -> Callable[[], int]:
    def start() -> int:
        from data.cli import run_command
        run_command(import_module(module).main)
    return _command(start)


preprocess = _data_command("data.preprocess")
webtext = _data_command("data.webtext.__main__")
