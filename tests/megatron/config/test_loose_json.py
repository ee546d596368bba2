"""Comments and trailing commas are accepted, and nothing else that JSON refuses; errors name line and column."""

from __future__ import annotations

import json
import random

import pytest

from megatron.config.config_errors import ErrorList
from megatron.config.ds_json import parse_loose_json
from megatron.errors import ConfigError


@pytest.mark.parametrize(("text", "value"), [
    ('{"a": 1, // one\n "b": [1, 2,],\n}', {"a": 1, "b": [1, 2]}),
    ('# first\n{"a": /* between */ 1, # , }\n}', {"a": 1}),
    ('{"a": 1 /* over\n two lines */ , }', {"a": 1}),
    ('{"url": "http://x#y", "c": "/* */", "d": ",]", "e": "\\", // \\""}',
     {"url": "http://x#y", "c": "/* */", "d": ",]", "e": '", // "'}),
    ("[[],{},]", [[], {}]),
])
def test_comments_and_trailing_commas_are_accepted_outside_of_texts(text, value):
    assert parse_loose_json(text, "f", ErrorList()) == value


@pytest.mark.parametrize(("text", "told"), [
    ('{\n  "a": 1\n  "b": 2\n}', "f line 3 column 3: expected ',' or a closing bracket, found '\"b\"'"),
    ('{\n  // told\n  "a" 1}', "f line 3 column 7: expected ':' after the key, found '1'"),
    ('{"a":}', "f line 1 column 6: expected a value"),
    ("{'a': 1}", "f line 1 column 2: expected a key in double quotes"),
    ('{"a": 1}}', "f line 1 column 9: expected the end of the file, found '}'"),
    ('{"a": "x', "f line 1 column 7: expected a closing double quote"),
    ('{"a":', "found the end of the file"),
    ("", "f line 1 column 1: expected a value"),
    ("[,]", "f line 1 column 2"), ("{,}", "f line 1 column 2"), ("[1,,]", "f line 1 column 4"),
    ('{"a":,}', "f line 1 column 6"), ('{"a": 1 /* x }', "f line 1 column 9"),
    ("[" * 100_000, "nested too deeply"), ("1" * 5000, "too many digits"),
])
def test_an_error_names_line_and_column_and_what_was_expected(text, told):
    with pytest.raises(ConfigError) as caught:
        parse_loose_json(text, "f", ErrorList())
    assert told in str(caught.value)


def test_comments_anywhere_between_the_words_change_nothing():
    rng = random.Random(3)
    words = ["{", '"a"', ":", "[", "1", ",", '"//"', ",", "{", '"b#"', ":", "null", "}", "]", ",", '"c"', ":", "2", "}"]
    blanks = [" ", "\n", "// x , }\n", "# \" \n", "/* ] \n \" */", ""]
    for _ in range(300):
        text = "".join(word + rng.choice(blanks) + rng.choice(blanks) for word in words)
        assert parse_loose_json(text, "f", ErrorList()) == json.loads("".join(words)), text
