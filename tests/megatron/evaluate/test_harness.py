"""The command line of lm-eval's bridge, as far as it goes without lm-eval."""

from __future__ import annotations

from importlib.util import find_spec
from unittest.mock import patch

import pytest

from megatron.errors import ConfigError
from megatron.evaluate.harness import main

TYPED = ["--load", "a", "--tasks", "lambada_openai"]


def test_without_lm_eval_it_says_what_to_install() -> None:
    with patch("megatron.evaluate.harness.find_spec", lambda name: None if name == "lm_eval" else find_spec(name)), \
            pytest.raises(ConfigError, match="needs lm-eval: pip install lm_eval"):
        main(TYPED)


@pytest.mark.parametrize(("more", "words"), [
    (["--include-path", "missing"], "--include-path missing: no such folder"), (["--limit", "0"], "--limit is 0"),
    (["--batch-size", "0"], "--batch-size is 0"), (["--load-hf", "b"], "give one of --load and --load-hf"),
    (["--nonsense"], "--nonsense"),
])
def test_what_cannot_be_is_refused_in_words(more: list[str], words: str) -> None:
    with patch("megatron.evaluate.harness.find_spec", lambda name: name), pytest.raises(ConfigError, match=words):
        main([*TYPED, *more])
