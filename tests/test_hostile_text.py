"""Text that commands a terminal, breaks lines or is HTML, wherever a program shows text of others: it stays one line,
moves no cursor, and adds no element to a page."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from data import cli
from data.input_files import InputFiles
from data.storage import DataError
from data.webtext import report
from data.webtext.documents import DocumentCounts
from data.webtext.runner import StageRecord
from megatron.checkpoint import cli as checkpoint
from megatron.checkpoint.tags import print_to_stderr
from megatron.config.tree import LogConfig
from megatron.distributed import exit_codes
from megatron.inference.frontends import AnswerWriter
from megatron.inference.prompts import Terminal
from megatron.metrics.sinks import JsonlSink, RunConfigRecord
from megatron.report.run_report import RunHistory, report_page
from megatron.serve import cli as serve
from megatron.serve.app import playground
from megatron.train.run_log import RunLog
from tests.megatron.report.written import CONFIG, evaluation, step

TEXTS = {
    "colour": "a\x1b[31mb", "clear screen": "a\x1b[2J\x1b[Hb", "link": "\x1b]8;;http://a.org\x1b\\a\x1b]8;;\x1b\\",
    "clipboard": "a\x1b]52;c;aGk=\x07b", "bell": "a\x07b", "C1": "a\x9b31mb\x85c\x90d", "backspace": "abc\b\b\bxyz",
    "carriage return": "abc\rxyz", "new line": "abc\nerror: x\r\n{\"iteration\": 1}\x0bd\x0ce\x1cf", "delete": "a\x7fb",
    "line separator": "a\u2028b\u2029c", "right to left": "a\u202eb\u202dc\u2066d\u2069e", "no text": "a\udcffb",
    "script": "</script><script>alert(1)</script>", "image": "\"'><img src=x onerror=alert(1)>",
    "end of everything": "</pre></style></title></textarea>--><b>&lt;", "entity": "&amp;&#27;[31m", "null": "a\0b",
}
FORBIDDEN = [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A),
             *range(0xD800, 0xE000)]


class Screen(io.StringIO):
    """What a person sees."""

    def isatty(self) -> bool:
        return True


def data_error(text: str) -> None:
    def fail() -> NoReturn:
        raise DataError(f"{text}: cannot read")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(cli, "_interrupt_on_stop_signals", lambda: None)
        cli.run_command(fail)


def console_line(text: str) -> None:
    log = RunLog(LogConfig(log_interval=1), 1, 0, writes=True)
    log.print_line(f" saved global_step1 to {text}")
    log.close()


def checkpoint_list(text: str) -> str:
    found: Any = SimpleNamespace(tag=text, iteration=1, layout={"dp": text}, nbytes=1, history=())
    return f"{checkpoint._tag_text(found, {}, None)}\n"


def session(text: str) -> str:
    screen = Screen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdin", Screen())
        patch.setattr(sys, "stdout", screen)
        patch.setattr("megatron.inference.prompts._load_history", lambda: None)
        Terminal().write_answer(text)
    return screen.getvalue()


def answered(out: io.StringIO, text: str, jsonl: bool) -> str:
    """The prompt and its answer in two steps."""
    parts = [text[:3], text[3:]]
    shown = AnswerWriter(out, jsonl)
    shown.prompts.append(text)
    for ended in (None, "length"):
        now: Any = SimpleNamespace(request=SimpleNamespace(number=0), finish_reason=ended, tokens=[1], logprobs=[0.0],
                                   new_text=lambda: parts.pop(0), answer=lambda: text)
        shown.write_ready(now)
    return out.getvalue()


PLACES: dict[str, Callable[[str], str | None]] = {
    "errors": lambda text: exit_codes.write_error(f"--tag {text}: no such tag"), "errors of data": data_error,
    "the console": console_line, "checkpoint list": checkpoint_list,
    "warnings of checkpoints": lambda text: print_to_stderr(f"warning: {text} is damaged"),
    "files left out": lambda text: f"{InputFiles(others=[text]).left_out}\n",
    "a webtext stage": lambda text: report.summary_line(StageRecord(
        {"stage": "read"}, DocumentCounts(), (), (f"{text}: left out",))) + "\n",
    "the webtext table": lambda text: report.text_table([], [{
        "name": text, "documents": 1, "tokens": 1, "tokenizer": "x"}]).split("\n", 1)[1],
    "the server": lambda text: serve._log_to_stderr(f"127.0.0.1 GET {text} 404"), "a session": session,
    "answers": lambda text: answered(Screen(), text, jsonl=False),
    "answers as JSON": lambda text: answered(Screen(), text, jsonl=True)}
"""Each returns what a terminal is shown, or prints it."""
MANY_LINES = ("a session", "answers")
"""Where a model's text is shown, with its lines."""


@pytest.mark.parametrize("place", PLACES)
def test_a_terminal_gets_one_line_without_commands(place: str, capfd: pytest.CaptureFixture[str]) -> None:
    for name, text in TEXTS.items():
        returned = PLACES[place](text)
        found = returned if returned is not None else "".join(capfd.readouterr())
        if place not in MANY_LINES:
            assert found.endswith("\n") and len(found.splitlines()) == 1, (name, found)
        for character in found.replace("\n", ""):
            assert ord(character) not in FORBIDDEN, (name, character, found)
        assert all(word in found for word in ("a", "b")) or not text.startswith("a"), "it is shown, not left out"


def test_files_and_pipes_get_it_as_it_is(tmp_path: Path) -> None:
    for name, text in TEXTS.items():
        assert json.loads(answered(io.StringIO(), text, jsonl=True))["text"] == text
        assert answered(io.StringIO(), text, jsonl=False) == f"{text}{text}\n"
        assert json.loads(answered(Screen(), text, jsonl=True)) == json.loads(answered(io.StringIO(), text, jsonl=True))
        path = tmp_path / f"{name}.jsonl"
        sink = JsonlSink("--metrics-file", str(path), print)
        sink.write_config(RunConfigRecord(0, {"data": {"train_data": [text]}}, {}, ""))
        sink.close()
        (line,) = path.read_text().splitlines()
        assert json.loads(line)["values"]["data"]["train_data"] == [text]


class Elements(HTMLParser):
    """The elements and attributes of a page, and its text outside of scripts and styles."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[Any] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, [name for name, _ in attrs]))

    def handle_data(self, data: str) -> None:
        self.text += data if self.found[-1:] not in ([("style", [])], [("script", [])]) else ""


def of_the_report(text: str) -> str:
    values = {**CONFIG["values"], "data": {"train_data": [text], "seq_length": 8}}
    config = {**CONFIG, "began": text, "device": text, "values": values}
    history = RunHistory(text, [config, step(1), {**evaluation(1, 5.0), "split": text}])
    return report_page([history, history], [f"{text}: note"])


def of_the_webtext_report(text: str) -> str:
    counts = DocumentCounts(2, 10, 1, 5)
    counts.dropped[text], counts.dropped_bytes[text], counts.samples = 1, 5, {text: {"0": text}, "kept": {"0": text}}
    return report.html_page([StageRecord({"stage": text}, counts, ())], [{"name": text, "documents": 1, "tokens": 1,
                                                                         "tokenizer": text}])


def test_a_page_has_the_same_elements_whatever_it_shows() -> None:
    for made, text in product((of_the_report, of_the_webtext_report), TEXTS.values()):
        found = Elements(made(text))
        assert found.found == Elements(made("plain")).found, text
        if made is of_the_report:
            assert not any(ord(character) in FORBIDDEN for character in found.text.replace("\n", "")), text


def test_the_page_of_the_server_writes_text_only() -> None:
    shown, headers = playground()
    for way in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "srcdoc"):
        assert way not in shown
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe-inline" not in policy
