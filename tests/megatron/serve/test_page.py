"""The page, in a browser that people use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.megatron.serve.browser import BROWSER, DRIVER, Page, browser
from tests.megatron.serve.server import Server, served, trained

pytestmark = pytest.mark.skipif(BROWSER is None or DRIVER is None, reason="no Chromium with its chromedriver here "
                                "(Debian: chromium, chromium-driver)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(folder, tmp_path_factory.mktemp("server"), "--model-name", "small") as found:
        yield found


@pytest.fixture(scope="module")
def tab() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(server: Server, tab: Page) -> Page:
    tab.open(f"http://{server.host}:{server.port}/")
    tab.wait_for("#about", "positions")
    return tab


def test_a_text_comes_as_it_is_served(page: Page, server: Server) -> None:
    assert page.text("h1") == "small"
    page.type("#prompt", "Once upon a time")
    for name, value in (("max_tokens", "40"), ("temperature", "0.7"), ("top_k", "90"), ("seed", "11")):
        page.type(f"#{name}", value)
    page.click("#go")
    page.wait_for("#status", r"^16 \+ 40 tokens, [\d.]+ a second; ended: length; seed 11$")
    assert page.text("#answer .prompt") == "Once upon a time"
    assert page.text("#answer .text") == server.text(prompt="Once upon a time", max_tokens=40, temperature=0.7,
                                                     top_k=90, seed=11)
    assert page.complaints() == []


def test_stop_ends_it_here_and_there(page: Page, server: Server) -> None:
    for name, value in (("max_tokens", "2000"), ("temperature", "0")):
        page.type(f"#{name}", value)
    page.click("#go")
    page.wait_for("#answer .text", "..")
    page.click("#halt")
    page.wait_for("#status", "^stopped$")
    server.wait_for("texts_running", 0)
    assert len(page.text("#answer .text")) < 1900
    page.type("#max_tokens", "3")
    page.click("#go")
    page.wait_for("#status", "ended: length")
    assert page.complaints() == []


def test_what_is_generated_is_text_and_nothing_else(page: Page) -> None:
    evil = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
    page.type("#prompt", evil)
    page.type("#max_tokens", "1")
    page.click("#go")
    page.wait_for("#status", "ended")
    assert page.text("#answer .prompt") == evil
    assert page.run("return document.querySelectorAll('#answer *').length") == 2
    page.run("const s = document.createElement('script'); s.textContent = \"document.title='hacked'\"; "
             "document.body.append(s); document.body.insertAdjacentHTML('beforeend', arguments[0]);", evil)
    assert page.run("return document.title") == "small"
    assert page.complaints()  # the policy refused three of them


def test_errors_are_shown(page: Page) -> None:
    page.type("#prompt", "x" * 3000)
    page.click("#go")
    assert "at most 2048 can be read" in page.wait_for("#status", "tokens, and")
    assert page.run("return document.querySelector('#status').className") == "bad"


def test_another_sites_page_cannot_ask_through_a_visitors_browser(page: Page, server: Server) -> None:
    page.open("data:text/html,<p>another site")
    before = server.metric("prompt_tokens_total")
    for kind in ("application/json", "text/plain"):
        said = page.run("return fetch(arguments[0], {method: 'POST', headers: {'Content-Type': arguments[1]}, body: "
                        "'{}'}).then(() => 'read', () => 'refused')",
                        f"http://{server.host}:{server.port}/v1/completions", kind)
        assert said == "refused"
    assert server.metric("prompt_tokens_total") == before


def test_a_key_is_asked_for(folder: Path, tab: Page, tmp_path: Path) -> None:
    with served(folder, tmp_path, GPT2_SERVE_API_KEY="s3cret") as server:
        tab.open(f"http://{server.host}:{server.port}/")
        tab.wait_for("#status", "wants a key")
        tab.type("#key", "s3cret")
        tab.type("#max_tokens", "3")
        tab.click("#go")
        tab.wait_for("#status", "ended")
        assert tab.text("#about") == "2048 positions"
