"""Commands of a page, without running them: which programs they call, and whether those accept the flags.

The parser of a program is the one it makes itself: the program is started in this process with no arguments, and
stopped where it would parse them. So a page is checked against what a user would meet, whatever file the parser is in.
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from unittest.mock import patch

from tests.docs.reader import ROOT

TRAINER = "pretrain_gpt2.py"
TOOLS = frozenset("""
    awk cat cd cp curl cut diff du echo export find git grep gunzip gzip head kill
    less ln ls mkdir mpirun mv pip printf rm
    python3
    sbatch scontrol sed seq set sleep sort source split srun tail tensorboard torchrun touch tree true unzip wait wc
""".split())
"""Programs that are not ours; their flags are not looked at."""
INSTALLED = {"gpt2-train": TRAINER, "gpt2-launch": "megatron.launch", "gpt2-plan": "megatron.plan",
             "gpt2-checkpoint": "megatron.checkpoint", "gpt2-generate": "megatron.generate",
             "gpt2-evaluate": "megatron.evaluate", "gpt2-serve": "megatron.serve", "gpt2-report": "megatron.report",
             "gpt2-tune": "megatron.tune",
             "gpt2-preprocess": "data.preprocess", "gpt2-webtext": "data.webtext"}
"""What the commands of an installation start."""
KEYWORDS = frozenset("do done then fi else if while { } !".split())
_OPERATORS = frozenset("| || & && ; ( ) ;;".split())


class _Stop(BaseException):
    """Leaves a program at its first parse."""


def commands(script: str) -> list[list[str]]:
    """The simple commands of a shell script as words: no variables before them, no redirections, no keywords."""
    found = []
    for line in _logical_lines(script):
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        lexer.commenters = "#"
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _OPERATORS or (set(word) <= set("();&|") and word):
                command = _simple(words)
                if command:
                    found.append(command)
                words = []
            else:
                words.append(word)
    return found


def _logical_lines(script: str) -> Iterator[str]:
    """Lines with continuations joined, variables filled in and here documents left out."""
    values = {name: "0" if name.endswith(("ID", "RANK")) else "2" for name in re.findall(r"\$\{?(\w+)", script)}
    values |= dict(re.findall(r"\bfor (\w+) in ([^\s;]+)", script))
    filled = re.sub(r"\$\{(\w+)[^}]*\}|\$(\w+)", lambda match: values[match.group(1) or match.group(2)], script)
    joined = filled.replace("\\\n", " ")
    end = None
    for line in joined.splitlines():
        if end is not None:
            end = None if line.strip() == end else end
            continue
        document = re.search(r"<<-?\s*['\"]?(\w+)['\"]?", line)
        end = document.group(1) if document else None
        if line.strip() and not line.lstrip().startswith("#"):
            yield line


def _simple(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if re.fullmatch(r"[<>]+", word):
            if kept and kept[-1] in ("1", "2"):
                kept.pop()
            next(rest, None)
        elif not kept and (re.match(r"\w+=", word) or word in KEYWORDS):
            continue
        else:
            kept.append(word)
    if kept and kept[0] in ("for", "exec", "nohup", "time"):
        return [] if kept[0] == "for" else _simple(kept[1:])
    return kept


def complaint(words: Sequence[str]) -> str | None:
    """Why this command cannot be meant; None where its program accepts it."""
    program, arguments = split_program(words)
    if program is None:
        return None if words[0] in TOOLS else f"unknown program {words[0]!r}"
    if program == "megatron.launch":
        head, script = _launched(arguments)
        return _unknown(program, head) or (complaint(["python", *script]) if script else "no script")
    if program in ("megatron.plan", "megatron.tune"):
        return _unknown(program, arguments, then=TRAINER)
    return _unknown(program, arguments)


def split_program(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Which of our programs a command starts (a module, or a path in the repository), and its arguments."""
    if words[0] in INSTALLED:
        return INSTALLED[words[0]], list(words[1:])
    if words[0] == "bash" and len(words) > 1 and words[1].startswith("scripts/"):
        return words[1], list(words[2:])
    if words[0] == "python" and len(words) > 1:
        options = list(words[1:])
        while options and options[0] in ("-P", "-u"):
            options.pop(0)
        if options and options[0] == "-m":
            return options[1], options[2:]
        if options and options[0] not in ("-c", "-"):
            return options[0], options[1:]
        return None, []
    return None, []


def _launched(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's options, and the script with its arguments."""
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] != "-m":
        at += 1 if "=" in arguments[at] else 2
    return list(arguments[:at]), list(arguments[at:])


def _unknown(program: str, arguments: Sequence[str], then: str | None = None) -> str | None:
    """What the parsers of `program` (and of the program its unknown flags are for) say of these arguments."""
    known = parser_of(program)
    if isinstance(known, str):
        return known or None
    given = [word for word in arguments if word != "..."]
    if known.prog.startswith("pretrain") or then:
        given = [_dashed(word) for word in given]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            rest = known.parse_known_args(given)[1]
    except SystemExit:
        return f"{program}: {said.getvalue().strip().splitlines()[-1]}"
    except Exception as error:
        return f"{program}: {error}"
    if known.prog.startswith("pretrain") and "--dry-run" in given:
        then = "megatron.plan"
    if rest and then:
        return _unknown(then, rest)
    return f"{program} does not know {' '.join(rest)}" if rest else None


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


@cache
def parser_of(program: str) -> argparse.ArgumentParser | str:
    """The parser a program makes for itself; "" for one without; a sentence for one that does not exist."""
    if program.startswith("scripts/") and program.endswith(".sh"):
        if not (ROOT / program).exists():
            return f"no script {program}"
        return parser_of(TRAINER) if "pretrain_gpt2" in program else ""
    if program in ("pytest", "pip", "venv", "torch.distributed.run", "tests.docs.session"):
        return ""
    if program.endswith(".py") and not (ROOT / program).exists():
        return parser_of(ZERO_TO_FP32) if program == "zero_to_fp32.py" else ""  # of the page itself
    return _captured(program) or f"{program}: no program that takes arguments"


ZERO_TO_FP32 = "megatron.checkpoint.zero_to_fp32"


def _captured(program: str) -> argparse.ArgumentParser | None:
    seen: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        seen.append(parser)
        raise _Stop

    nowhere = io.StringIO()
    with patch.object(argparse.ArgumentParser, "parse_known_args", stop), patch.object(sys, "argv", [program]), \
            contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(BaseException):
            if program == TRAINER:
                from megatron.config import cli

                cli.parse_args([])
            elif program.endswith(".py"):
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
    return seen[0] if seen else None


def console_commands() -> dict[str, str]:
    """The commands that installing puts on the path -> `module:function`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["options.entry_points"]["console_scripts"].strip().splitlines()
    return {name.strip(): target.strip() for name, _, target in (line.partition("=") for line in lines)}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every long option a parser and its subcommands know."""
    found = set()
    for action in parser._actions:
        found |= {option for option in action.option_strings if option.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= flags_of(sub)
    return found


def own_programs() -> list[str]:
    """Every program of the repository that a page may name flags of."""
    bench = [f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.py"))
             if "ArgumentParser" in path.read_text()]
    return [*INSTALLED.values(), ZERO_TO_FP32, "data.verify", "data.merge", "data.split_json", "data.importers",
            "data.default_corpus", "megatron.evaluate.harness", *bench]
