"""Every HTML page: one stylesheet, one file that loads nothing, readable on a phone and in the dark."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from data.html_page import style_sheet
from megatron.serve.app import playground
from tests.megatron.helpers import ROOT
from tests.test_hostile_text import of_the_report, of_the_webtext_report

PAGES: dict[str, Callable[[], str]] = {
    "report": lambda: of_the_report("run"), "web text": lambda: of_the_webtext_report("stage"),
    "server": lambda: playground()[0]}
COLOUR = r"#[0-9a-f]{3,8}\b|\b(?:rgb|hsl|white|black|red|green|gr[ae]y)\b(?!-)"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_shared_stylesheet_and_no_other_style_or_resource(page: str) -> None:
    text = PAGES[page]()
    styles = re.findall(r"<style>\n?(.*?)</style>", text, re.DOTALL)
    assert styles == [style_sheet()]
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text and "{{" not in text
    rest = text.replace(style_sheet(), "")
    assert not re.search(COLOUR, rest), "a colour outside of the stylesheet would not follow the dark"
    assert not re.search(r"<(link|img|iframe|script[^>]*src)(?![^>]*data:)", rest)


def test_each_colour_is_a_pair_of_light_and_dark_and_nothing_is_wider_than_a_phone() -> None:
    style = style_sheet()
    assert "color-scheme: light dark;" in style
    assert not re.search(COLOUR, re.sub(r"light-dark\(#\w+, #\w+\)", "", style))
    widths = [float(size) * (16 if unit == "rem" else 1) for size, unit in re.findall(
        r"(?<![-\w])(?:min-)?width: ([\d.]+)(rem|px)", style)]
    assert widths and max(widths) <= 390
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) <= set(re.findall(r"(--[\w-]+): light-dark", style))


def test_no_other_file_of_the_product_writes_a_stylesheet() -> None:
    files = [path for package in ("data", "megatron", "mpu") for path in Path(ROOT, package).rglob("*")]
    found = {path.name for path in files if path.suffix in (".py", ".html") and "<style" in path.read_text("utf-8")}
    assert found == {"html_page.py", "page.html"}
