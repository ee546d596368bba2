"""The command line of lm-eval's bridge, as far as it goes without lm-eval."""

from __future__ import annotations

from importlib.util import find_spec
from unittest.mock import patch

import pytest

from megatron.errors import ConfigError
from megatron.evaluate.harness import main, translate_errors

TYPED = ["--load", "a", "--tasks", "lambada_openai"]


def test_without_lm_eval_it_says_what_to_install() -> None:
    with patch("megatron.evaluate.harness.find_spec", lambda name: None if name == "lm_eval" else find_spec(name)), \
            pytest.raises(ConfigError, match="needs lm-eval: pip install lm_eval"):
        main(TYPED)


class ConnectError(Exception):
    """As httpx has it: neither an OSError nor a ConnectionError."""


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(("error", "words"), [
    (ConnectionError("Couldn't reach the hub"), r"data of this cannot be fetched; is there a network\?.*reach the hub.*"
     "--include-path"),
    (ConnectError("no name"), "is there a network"),
    (raised(ValueError("no such configuration"), ConnectError("no name")), "is there a network"),
    (KeyError("no_task"), "lm-eval cannot load this.*no_task.*`lm-eval ls tasks` lists its tasks.*--include-path"),
    (FileNotFoundError("lambada.jsonl"), "lm-eval cannot load this"),
])
def test_data_that_no_network_brought_is_told_from_a_task_that_is_not_there(error: Exception, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--tasks a,b: .*{words}"), translate_errors(["a", "b"]):
        raise error


def test_an_error_of_another_kind_stays_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), translate_errors(["a"]):
        raise ZeroDivisionError


@pytest.mark.parametrize(("more", "words"), [
    (["--include-path", "missing"], "--include-path missing: no such folder"), (["--limit", "0"], "--limit is 0"),
    (["--batch-size", "0"], "--batch-size is 0"), (["--load-hf", "b"], "give one of --load and --load-hf"),
    (["--nonsense"], "--nonsense"),
])
def test_what_cannot_be_is_refused_in_words(more: list[str], words: str) -> None:
    with patch("megatron.evaluate.harness.find_spec", lambda name: name), pytest.raises(ConfigError, match=words):
        main([*TYPED, *more])
