"""JSON as people write it: comments (`//`, `#`, `/* */`) and trailing commas are accepted, and nothing else is.

Comments and trailing commas are overwritten with spaces and the standard parser does the rest, so that its line and
column are those of the file. An object stays a list of its pairs (`Pairs`): a dict would hide a key given twice.
"""

from __future__ import annotations

import json
import re
from typing import Any

from megatron.errors import ConfigError

_STRING = r'"(?:[^"\\\n]|\\.)*"'
_COMMENT = re.compile(rf"({_STRING})|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
_TRAILING = re.compile(rf'{_STRING}|(?<=[^\s\[{{,:])(\s*),(?=\s*[\]}}])', re.DOTALL)

_EXPECTED = {
    "Expecting ',' delimiter": "expected ',' or a closing bracket",
    "Expecting ':' delimiter": "expected ':' after the key",
    "Expecting property name enclosed in double quotes": "expected a key in double quotes, or '}'",
    "Expecting value": 'expected a value (a number, "text", true, false, null, {...} or [...])',
    "Extra data": "expected the end of the file",
    "Unterminated string starting at": "expected a closing double quote for the text that starts here",
}
"""The parser's words -> ours; the rest are clear already."""


class JsonPairs(list[tuple[str, Any]]):
    """The (key, value) pairs of one JSON object, in the file's order."""


def parse_loose_json(text: str, name: str) -> Any:
    """The value of a JSON text; ConfigError with line and column, `name` being the file."""
    plain = _TRAILING.sub(lambda m: m[0] if m[1] is None else m[1] + " ", _COMMENT.sub(_blank_comment, text))
    try:
        return json.loads(plain, object_pairs_hook=JsonPairs)
    except json.JSONDecodeError as error:
        told = _EXPECTED.get(error.msg, error.msg)
        found = _word_at(text, error.pos)
        raise ConfigError(f"{name} line {error.lineno} column {error.colno}: {told}, found {found}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply to be a configuration") from None
    except ValueError:  # Python refuses integers of more than 4300 digits, and does not say where
        raise ConfigError(f"{name} holds a number of too many digits") from None


def _blank_comment(match: re.Match[str]) -> str:
    return match[0] if match[1] else re.sub(r"[^\n]", " ", match[0])


def _word_at(text: str, position: int) -> str:
    word = re.match(r'[\w."+-]+|.', text[position:])
    return repr(word[0][:30]) if word else "the end of the file" if not text[position:] else "the end of the line"
