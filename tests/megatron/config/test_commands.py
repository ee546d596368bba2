"""Every command has one kind of parser: dashes or underscores, no guesses but for what is nearly a flag of its own."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import pytest

from data.cli import suggest_spelling
from data.storage import UsageError
from data.webtext.__main__ import build_parser as webtext
from megatron.checkpoint.cli import parse_arguments as checkpoint
from megatron.errors import ConfigError
from megatron.evaluate.cli import build_parser as evaluate
from megatron.inference.cli import build_parser as generate
from megatron.plan.cli import parse as plan
from megatron.report.run_report import build_parser as report
from megatron.serve.cli import build_parser as serve
from megatron.tune.cli import parse as tune

COMMANDS: dict[str, tuple[Callable[[list[str]], object], Sequence[str], str, str]] = {
    "plan": (plan, [], "--rank", "--ranks"), "tune": (tune, [], "--card_gbs", "--card-gb"),
    "report": (report().parse_args, ["run"], "--outptu", "--output"),
    "checkpoint": (checkpoint, ["list", "run"], "--checkpoint_verison", "--checkpoint-version"),
    "generate": (generate().parse_args, [], "--loda", "--load"), "serve": (serve().parse_args, [], "--prot", "--port"),
    "evaluate": (evaluate().parse_args, ["--task", "wikitext", "--data", "x"], "--protocl", "--protocol"),
    "webtext": (webtext().parse_args, ["clean", "x", "--output", "y"], "--overwrit", ""),
}
"""Command -> its parser, what it needs, a misspelt flag and the one that was meant."""


def complaint(parse: Callable[[list[str]], object], argv: list[str]) -> str:
    with pytest.raises((ConfigError, UsageError)) as caught:
        parse(argv)
    return str(caught.value)


def test_a_command_answers_what_is_nearly_its_flag_and_guesses_nothing_else() -> None:
    for parse, needed, typed, meant in COMMANDS.values():
        said = complaint(parse, [*needed, typed, "4"])
        assert f"unknown flag {typed.replace('_', '-')}" in said
        assert f"did you mean {meant}?" in said if meant else "did you mean" not in said
        for foreign in ("--gas", "--fp8-format", "--use-dist-ckpt"):
            said = complaint(parse, [*needed, foreign, "4"])
            assert f"unknown flag {foreign}" in said and "did you mean" not in said


def test_dashes_and_underscores_are_the_same_up_to_two_dashes_of_their_own() -> None:
    asked: argparse.Namespace = generate().parse_args(["--load", "x", "--num_samples=2", "--", "--top_k"])
    assert asked.num_samples == 2 and asked.prompts == ["--top_k"]


def test_how_near_a_flag_has_to_be() -> None:
    for word, found in (("--prot", "--port"), ("--POR_T", "--port"), ("--pots", ""), ("--por", ""), ("--lod", ""),
                        ("--laod", "--load"), ("--mx-conections", "--max-connections"), ("--m-conections", "")):
        hint = suggest_spelling(word, ["--port", "--load", "--max-connections"])
        assert hint == (f"did you mean {found}?" if found else "")
