"""The commands of the program: what `python -m megatron.plan` and the scripts of an installation (`setup.cfg`) start.

Each returns its exit code and also knows `--version`. All imports come after the first handler of stop signals, which
ends the program with one line. The launcher runs where another package hides one of ours: its ranks check themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module

from megatron.distributed.signals import exit_on_stop_signal


def _command(start: Callable[[], int], before: str = "it began", *, needs_packages: bool = True) -> Callable[[], int]:
    """`start`, unless the version is asked for or a package of ours is hidden."""
    def command() -> int:
        exit_on_stop_signal(before)  # until the command listens by itself: the imports take a while
        from megatron.distributed.exit_codes import prepare_streams, run, write_error
        from megatron.package import DISTRIBUTION, ShadowedPackageError, __version__, check_package_shadowing

        prepare_streams()
        if sys.argv[1:] == ["--version"]:
            return run(lambda: print(f"{DISTRIBUTION} {__version__}"))
        try:
            if needs_packages:
                check_package_shadowing()
        except ShadowedPackageError as hidden:
            write_error(str(hidden))
            return hidden.code
        return start()
    return command


def _command_of(module: str) -> Callable[[], int]:
    """The `main` of a module."""
    def start() -> int:
        from megatron.distributed.exit_codes import run
        return run(lambda: import_module(module).main())
    return _command(start)


def _data_command(module: str) -> Callable[[], int]:
    return _command(lambda: import_module("data.cli").run_command(import_module(module).main))


train = _command(lambda: import_module("pretrain_gpt2").program())
launch = _command(lambda: import_module("megatron.launch.launcher").main(sys.argv[1:]), "a rank was started",
                  needs_packages=False)
checkpoint = _command_of("megatron.checkpoint.cli")
plan = _command_of("megatron.plan.cli")
generate = _command_of("megatron.inference.cli")
evaluate = _command_of("megatron.evaluate.cli")
harness = _command_of("megatron.evaluate.harness")
serve = _command_of("megatron.serve.cli")
report = _command_of("megatron.report.run_report")
tune = _command_of("megatron.tune.cli")
preprocess = _data_command("data.preprocess")
webtext = _data_command("data.webtext.__main__")
