"""Every command and example of every page is run, and prints what the page shows (slow tests: minutes).

What every page names exists: its links, files and modules, and the flags of its commands (quick tests, which run
nothing).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
import runpy
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.config.cli import PRINTED_TEXTS, known_flags

from tests.docs.reader import PAGES, ROOT, RUN, PageError, anchors, blocks, inline_code, links, prose, stray_commands
from tests.docs.session import Comparison, Session, follow

SHORT_NAMES = {"zero": "megatron.zero", "recompute": "megatron.recompute"}
"""Names that the pages use as their examples import them."""

PROGRAMS = [f"megatron.{name}" for name in ("launch", "plan", "checkpoint", "generate", "evaluate", "serve", "report",
                                            "tune", "checkpoint.zero_to_fp32", "evaluate.harness")]
PROGRAMS += [f"data.{name}" for name in ("preprocess", "webtext", "verify", "merge", "mix", "split_json", "importers",
                                         "default_corpus")]
PROGRAMS += [f"benchmarks/{path.name}" for path in sorted((ROOT / "benchmarks").glob("*.py"))
             if "ArgumentParser" in path.read_text()]
"""Beside the trainer: every program of the repository that a page may name flags of."""

OF_OTHERS = frozenset("""
    --local_rank --warmup-type log --ntasks-per-node --gpus-per-node --nodes --signal --array --additional-suffix
    --dtype --learning-rate --epochs --device --pipeline-model-parallel-size --help --help-all --logdir --train-dta
    --name --no-name --version --install --no-deps --accelerator-side --retry --retry-connrefused --retry-delay
    --local-dir
""".split())
"""Flags that pages name though no program of ours has them: Slurm's, other programs', and those we explain away."""

OF_THE_READER = frozenset(["train.py"])


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in PAGES if any(not block.skip for block in blocks(path.read_text()))],
                         ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_page_says_is_what_happens(path: Path, tmp_path: Path) -> None:
    session = Session(tmp_path)
    try:
        wrong = [complaint for _, _, complaint in follow(session, path.read_text()) if complaint]
    finally:
        session.close()
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_keeps_to_the_convention_and_what_it_names_exists(path: Path) -> None:
    text = path.read_text()
    lost = {f"line {line}: the link {target}" for line, target in lost_links(path)}
    if path.name != "CHANGELOG.md":
        blocks(text)
        lost |= {f"{command}: commands belong in ```bash blocks (docs/README.md)" for command in stray_commands(text)}
        if path.parent.name != "decisions":  # which also speak of what was, and of what was not chosen
            lost |= {f"line {line}: {name}" for line, name in lost_names(text)}
    assert not lost, "\n".join(sorted(lost))


def test_most_blocks_are_run() -> None:
    found = [block for path in PAGES for block in blocks(path.read_text()) if block.language in RUN and not block.file]
    skipped = [block.skip for block in found if block.skip]
    assert 3 * len(skipped) <= len(found), f"{len(skipped)} of {len(found)} blocks are not run: {skipped}"


def lost_links(path: Path) -> Iterator[tuple[int, str]]:
    for line, target in links(path.read_text()):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not re.match(r"[a-z]+:", target) and (
                not file.exists() or (anchor and anchor not in anchors(file.read_text()))):
            yield line, target


def linked(page: Path) -> set[str]:
    """The files of the repository that a page links to."""
    targets = {(page.parent / target.partition("#")[0]).resolve() for _, target in links(page.read_text())}
    return {str(path.relative_to(ROOT)) for path in targets if path.is_relative_to(ROOT)}


def test_the_index_names_every_page() -> None:
    pages = {str(path.relative_to(ROOT)) for path in PAGES if path.parent == ROOT / "docs"}
    assert not pages - {"docs/README.md"} - linked(ROOT / "docs" / "README.md")


def test_the_readme_is_three_screens_and_leads_to_the_pages() -> None:
    """It is not a second index: it says first what the program is, the two commands, and what the first one trains."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 110
    assert {"docs/README.md", "docs/tutorial.md", "docs/install.md", "docs/deepspeed.md", "examples/README.md",
            "CONTRIBUTING.md"} <= linked(ROOT / "README.md")
    first = "\n".join(text.splitlines()[:45])
    assert all(words in first for words in ("Python 3.11", "bash scripts/pretrain_gpt2.sh", "bash scripts/test.sh"))


def test_decisions_have_numbers_of_their_own() -> None:
    names = [path.name for path in (ROOT / "docs" / "decisions").glob("*.md")]
    numbers = [name[:3] for name in names if name[:3].isdigit()]
    assert len(numbers) == len(set(numbers)), sorted(names)
    for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md"):
        assert path.name[:3] in path.read_text().splitlines()[0], f"{path.name}: the heading has another number"


@cache
def repository_files() -> frozenset[str]:
    skipped = {"runs", "__pycache__", "build", "dist"}
    return frozenset(
        str(path.relative_to(ROOT)) for path in ROOT.rglob("*")
        if path.is_file() and not any(part in skipped or part.startswith(".") for part in path.relative_to(ROOT).parts))


def code_of(text: str) -> list[tuple[int, str]]:
    """(line, code) of what a page quotes, and of every line of its shell blocks."""
    return inline_code(text) + [(block.line + number, line) for block in blocks(text) if block.language == "bash"
                                for number, line in enumerate(block.text.splitlines(), 1)]


def paths_in(code: str) -> Iterator[str]:
    """Words that are files of ours: with a folder of the repository before them, or a bare name of a program."""
    for word in re.split(r"[\s,;:()=]+", code):
        if re.fullmatch(r"(?:megatron|mpu|data|docs|tests|scripts|examples)/[\w./-]*|[\w-]+\.(?:py|sh)", word):
            yield word


def lost_names(text: str) -> Iterator[tuple[int, str]]:
    """Files, modules and flags that a page names and the repository does not have."""
    saved = {block.file for block in blocks(text)}
    for line, code in inline_code(text):
        for name in set(paths_in(code)) - OF_THE_READER - saved:
            if not ((ROOT / name).exists() if "/" in name else
                    any(f"/{file}".endswith(f"/{name}") for file in repository_files())):
                yield line, name
    for line, code in code_of(text):
        yield from ((line, name) for name in names_in(code) if not resolves(name))
    for line, code in [*enumerate(prose(text).splitlines(), 1), *code_of(text)]:
        yield from ((line, flag) for flag in re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*", code)
                    if flag.replace("_", "-") not in every_flag() and flag not in OF_OTHERS)


def names_in(code: str) -> Iterator[str]:
    """Dotted names of our packages at the start of a piece of code, or after `-m`."""
    for match in re.finditer(r"(?:^|-m )((?:megatron|mpu|data|zero|recompute)(?:\.\w+)+)(?![\w/*-])", code):
        if not re.search(r"\.(?:py|sh|json|md|bin|idx)$", match.group(1)):
            yield match.group(1)


def resolves(name: str) -> bool:
    head, _, rest = name.partition(".")
    parts = [*SHORT_NAMES.get(head, head).split("."), *rest.split(".")]
    for cut in range(len(parts), 0, -1):
        try:
            thing = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        try:
            for part in parts[cut:]:
                thing = getattr(thing, part)
            return True
        except AttributeError:
            return False
    return False


class _Stop(BaseException):
    """Leaves a program at its first parse."""


def parser_of(program: str) -> argparse.ArgumentParser:
    """The one that the program makes for itself: it is started in this process, and stopped where it would parse."""
    seen: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *args: object, **kwargs: object) -> None:
        seen.append(parser)
        raise _Stop

    nowhere = io.StringIO()
    with patch.object(argparse.ArgumentParser, "parse_known_args", stop), patch.object(sys, "argv", [program]), \
            contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere), warnings.catch_warnings(), \
            contextlib.suppress(BaseException):
        warnings.simplefilter("ignore")
        if program.endswith(".py"):
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    assert seen, f"{program}: no program that takes arguments"
    return seen[0]


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """Every long option a parser and its subcommands know."""
    found = set()
    for action in parser._actions:
        found |= {option for option in action.option_strings if option.startswith("--")}
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found |= flags_of(sub)
    return found


@cache
def every_flag() -> frozenset[str]:
    own = {*known_flags(), *PRINTED_TEXTS}  # of pretrain_gpt2.py
    return frozenset(flag.replace("_", "-") for flag in own.union(*(flags_of(parser_of(name)) for name in PROGRAMS)))


# ---- the reader and the comparison themselves ----------------------------------------------------------------------

A, B, C = "ab12" * 16, "cd34" * 16, "ef56" * 16


def test_a_page_is_read_in_order_with_files_and_reasons() -> None:
    page = ("# T\n\n```python example.py\nx = 1\n```\n\n"
            "```bash\npython example.py\n```\n\nprints\n\n```text\nhello\n```\n"
            "<!-- docs-test: skip needs 8 GPUs -->\n```bash\npython big.py\n```\n"
            "<!-- docs-test: needs ftfy, py3langid -->\n```bash\npython web.py\n```\n")
    first, second, third, fourth = blocks(page)
    assert (first.file, first.language, first.text) == ("example.py", "python", "x = 1")
    assert (second.prints, second.skip, second.line) == ("hello", "", 7)
    assert (third.prints, third.skip) == (None, "needs 8 GPUs")
    assert (fourth.skip, fourth.needs) == ("", ("ftfy", "py3langid"))
    assert stray_commands("text\n\n    python x.py\n    a formula\n\n```bash\n    python y.py\n```") == ["python x.py"]
    assert links("a [b](c.md#d-e) `[x](y)`")[0] == (1, "c.md#d-e")
    assert anchors("## What a run tells\n### `mpu`, alone\n") == {"what-a-run-tells", "mpu-alone"}


def test_a_page_off_the_convention_is_refused() -> None:
    for page in ("<!-- docs-test: skip -->\n```bash\nls\n```", "<!-- docs-test: needs -->\n```bash\nls\n```",
                 "```\nls\n```", "```console\n$ ls\n```", "```text\nnobody printed this\n```", "```bash\nls\n"):
        with pytest.raises(PageError):
            blocks(page)


def test_what_may_differ() -> None:
    for shown, same, other in (
            ("lm loss 8.398036E+00 |", "lm loss 8.401E+00 |", "lm loss 8.498E+00 |"),
            ("iteration 10/ 20", "iteration 10/ 20", "iteration 11/ 20"),
            ("(1.6 MB in 0.36 s)", "(1.6 MB in 12 s)", "(1.9 MB in 0.36 s)"),
            ("time (ms): 38.9 | tokens/s 6584", "time (ms): 1.2 | tokens/s 9", "time (ms): 1.2 | tokens 9"),
            ("1561616 bytes", "1563522 bytes", "1763522 bytes"),
            ("saved ... to runs/a", "saved global_step3 to runs/a", "saved global_step3 to runs/b"),
            ("saved .../runs/a", "saved /home/me/runs/a", "saved home/b"),
            ("a\n...\nd", "a\nb\nc\nd", "a\nd\ne"), ("...\nb\n...\nb", "b\nb", "b"), ("a\nd", "a\n\nd", "a\nb\nd"),
            ("CPU, 2 threads: fine", "CPU, 1 thread: fine", ""), ("", "", "a")):
        assert Comparison().difference(shown, same) is None
        assert Comparison().difference(shown, other) is not None


def test_a_checksum_may_be_another_but_the_same_stays_the_same() -> None:
    page = Comparison()
    assert page.difference(f"total {A}", f"total {B}") is None
    assert page.difference(f"total {A[:12]}...", f"total {B}") is None, "the same, cut short"
    assert page.difference(f"total {A[:12]}...", f"total {C}") is not None
    assert page.difference(f"total {A}", f"total {C}") is not None
    other = Comparison()
    assert other.difference(f"{A}\n{B}", f"{C}\n{C}") is not None, "two of the page are one here"
