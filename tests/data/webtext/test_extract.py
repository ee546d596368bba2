"""extract: of any page, however it is written, the text that a browser shows, with either extractor."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from itertools import product
from pathlib import Path

import pytest

from data.storage import DataError
from data.webtext import extract
from data.webtext.documents import Document, DroppedDocument
from data.webtext.extract import EXTRACTORS, ExtractOptions
from data.webtext.readers import WebReadOptions
from data.webtext.runner import MapStage, run_map_stage
from data.webtext.readers import find_source_files
from tests.data.webtext.test_map_stages import GOOD

pytest.importorskip("resiliparse")

PAGE = """<!DOCTYPE html><html><head><title>T</title><style>p{}</style></head><body><nav><a href=/>Menu</a></nav>
<main><h1>A &amp; B</h1><p>First   <b>para</b>graph,
one line.</p><script>if (a < b) alert("x")</script><p>Second&nbsp;one &lt;b&gt;</p><ul><li>one</li><li>two</li></ul>
<pre>a
  b</pre></main><footer>All rights</footer></body></html>"""

CONTEXTS = {  # what a page may be around its text
    "body": "<!DOCTYPE html><html><body>{}</body></html>",
    "form": "<html><body><form action=/x><input type=hidden name=state>{}</form></body></html>",
    "head never closed": "<html><head><title>T</title><meta name=a content=b>{}",
    "comment first": "<!-- made by hand --><!--><html><body>{}</body></html>",
    "nothing but a title": "<title>T</title>{}",
    "nav never closed": "<body><nav><a href=/>Menu</a><main>{}</main></body>",
    "all in a header": "<body><header>{}</header></body>",
    "shown by a script": "<html><body style='visibility: hidden'>{}</body></html>",
    "classes of the body": "<html><body class='sidebar menu footer'>{}</body></html>",
    "table": "<html><body><table><tr><td>{}</td><td>x</td></tr></table></body></html>",
    "list": "<html><body><ul><li>{}</li></ul></body></html>",
    "links": "<html><body><div><div><div><div><ul><li><a href=/>{}</a> <a href=/>x</a></li></ul></div></div></body>",
    "deep": "<html><body>" + "<div>" * 3000 + "{}</html>",
    "XML": '<?xml version="1.0"?><!-- x --><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0//EN"><html><head><title/>'
           '<script src="a/b>c.js"/></head><body><a id="top"/>{}</body></html>',
}
CONSTRUCTS = {  # between two paragraphs: a piece of HTML, what is shown of it, and what is not
    "nothing": ("", "", ""),
    "self-closing svg": ("<svg/>", "", ""),
    "svg": ("<svg><title>HIDDEN</title><path d='M0'/></svg>", "", "HIDDEN"),
    "comment with an odd end": ("a<!-- HIDDEN --!>b", "ab", "HIDDEN"),
    "CDATA in svg": ("a<svg><desc><![CDATA[</p>]]></desc></svg>b", "ab", ""),
    "form": ("<form><p>words</p><input value=HIDDEN></form>", "words", "HIDDEN"),
    "controls": ("<label>Name</label><button>HIDDEN</button><select><option>HIDDEN</select><textarea>HIDDEN</textarea>",
                 "Name", "HIDDEN"),
    "template": ("a<template><p>HIDDEN</p></template>b", "ab", "HIDDEN"),
    "noscript": ("a<noscript><p>HIDDEN</noscript>b", "ab", "HIDDEN"),
    "script": ("a<script>x = '</p><b>HIDDEN'</script>b", "ab", "HIDDEN"),
    "captions": ("<table><caption>one</caption><tr><td>two</table><figure><img alt=HIDDEN><figcaption>three"
                 "</figcaption></figure>", "one two three", "HIDDEN"),
    "pre": ("<pre>\nx\n\ty   z\n</pre>", "x\n\ty   z", ""),
    "hidden elements": ("a<p hidden>HIDDEN</p><p style='color: red; display:none'>HIDDEN</p>"
                        "<p style='visibility: hidden'>HIDDEN</p><p>b", "a b", "HIDDEN"),
    "dialogs": ("<dialog>HIDDEN</dialog><dialog open>shown</dialog>", "shown", "HIDDEN"),
    "details": ("<details><summary>one</summary>two</details>", "one two", ""),
    "entities": ("&lt;p&gt; &amp;amp; caf&eacute;&#x20AC; &copy 5 &notanentity;", "<p> &amp; caf\u00e9\u20ac \u00a9 5 "
                 "\u00acanentity;", ""),
    "a tag that never ends": ("a <b title='", "a", ""),
    "plaintext": ("a<plaintext>b</plaintext>", "ab</plaintext>", ""),
    "frames inside": ("<iframe>HIDDEN</iframe><noframes>HIDDEN</noframes>x", "x", "HIDDEN"),
    "MathML": ("<math><semantics><mi>x</mi><annotation>HIDDEN</annotation></semantics></math>", "x", "HIDDEN"),
    "ruby": ("<ruby>\u6f22<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "\u6f22(kan)", ""),
    "article": ("<article><header><h2>one</h2></header><p>two</article>", "one two", ""),
    "footnotes": ("<aside class=footnote role=note>one</aside>", "one", ""),
    "list of links": ("<ul><li><a href=/>one</a><li><a href=/>two</a></ul>", "one two", ""),
}
SWALLOWS = {"a tag that never ends": "the rest of the page is its attribute"}


@pytest.mark.few(90)
@pytest.mark.parametrize(("extractor", "context", "construct"),
                         [*product(EXTRACTORS, CONTEXTS, CONSTRUCTS)])
def test_what_a_browser_shows_is_kept(extractor: str, context: str, construct: str) -> None:
    markup, shown, hidden = CONSTRUCTS[construct]
    page = CONTEXTS[context].format(f"<p>Before it.</p>{markup}<p>After it.</p>")
    found = extract.make_extract(ExtractOptions(extractor))(Document(page))
    assert isinstance(found, Document)
    text = found.text if "\n" in shown else without_signs(found.text)
    expected = ["Before it.", shown, *([] if construct in SWALLOWS else ["After it."])]
    if context == "shown by a script":  # without styles, all that could be shown
        hidden = hidden if construct not in ("hidden elements", "dialogs") else ""
        expected = expected[:1] if not hidden else expected
    at = 0
    for part in expected:
        at = text.find(part, at)
        assert at >= 0, (part, found.text)
    assert not hidden or hidden not in found.text


def without_signs(text: str) -> str:
    """One line, without the signs of lists."""
    return " ".join(text.replace("\u2022", " ").split())


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_the_text_of_a_page_in_paragraphs(extractor: str) -> None:
    found = extract.make_extract(ExtractOptions(extractor))(Document(PAGE, "u", {"a": 1}))
    assert found == Document("A & B\n\nFirst paragraph, one line.\n\nSecond\xa0one <b>\n\n  \u2022 one\n  \u2022 two\n"
                             "a\n  b", "u", {"a": 1})


@pytest.mark.parametrize("page", [
    "<div class=navbar>{}</div>", "<div role=navigation>{}</div>", "<div class='left sidebar'>{}</div>",
    "<ul class=menu><li>{}</ul>", "<div id=footer>{}</div>", "<a class=headerlink>{}</a>"])
def test_the_main_content_is_without_what_is_around_it(page: str) -> None:
    document = Document(f"<html><body><p>Text.</p>{page.format('AROUND')}</body></html>")
    main, everything = (extract.make_extract(ExtractOptions(extractor))(document) for extractor in EXTRACTORS)
    assert main == Document("Text.") and isinstance(everything, Document) and "AROUND" in everything.text


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_only_pages_are_touched(extractor: str) -> None:
    function = extract.make_extract(ExtractOptions(extractor))
    for text in (GOOD, "a < b and <b>bold</b>", "html", "<p>a fragment in an article about HTML</p>", "",
                 "<!-- a comment --> and no page", "<header file>"):
        assert function(Document(text)) == Document(text)
    assert function(Document("<p>x", None, {"file": "b", "format": "html"})) == Document("x", None, {"file": "b"})
    for page in (Document("\ufeff \n<!doctype HTML><p>x"), Document("<!-- a\n-->\n<!--><html><p>x"),
                 Document("<html lang=en><body>x"), Document('<?xml version="1.0"?>\n<html><body>x</body></html>')):
        assert function(page) == Document("x", None, page.meta)
    assert function(Document("<html><script>1</script></html>")) == DroppedDocument("no text in the page")
    assert extract.make_extract(ExtractOptions(extractor, "all"))(Document("<p>x</p>")) == Document("x")
    assert extract.make_extract(ExtractOptions(extractor, "none"))(Document(PAGE)) == Document(PAGE)


DISTINCT = " ".join(f"a{k}=x" for k in range(100_000))
COMPLEX = {  # quadratic in the parser: each would take minutes or many GB
    "attributes of one tag": f"<p {DISTINCT}>",
    "attributes of <body>": "".join(f"<body a{k}>" for k in range(90_000)),
    "attributes in SVG": f"<svg><script><p {DISTINCT}>",
    "names of elements": "".join(f"<x{k}>" for k in range(120_000)),
    "names of attributes": "".join(f"<p a{k}>" for k in range(90_000)),
    "options": "<select>" + "<option>" * 110_000,
    "end tags of other elements": "<x>" * 160_000 + "</y>" * 120_000,
    "formatting closed late": "<b>" + "<div>" * 100_000 + "</b>" * 100_000,
    "formatting opened again": "<p>" + "".join(f"<b a={k}>" for k in range(1000)) + "<p>x" * 250_000,
    "indentation": "<ul><li>x" * 100_000,
}


@pytest.mark.few(4)
@pytest.mark.parametrize("markup", COMPLEX.values(), ids=COMPLEX)
def test_a_page_that_is_too_complex_is_counted_by_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             markup: str) -> None:
    monkeypatch.setattr(extract, "_SECONDS", 0.5)
    (tmp_path / "a.html").write_text(f"<html><p>one</p>{markup}")
    (tmp_path / "b.html").write_text(PAGE + "<p>x" * 3000)
    stage = MapStage("extract", extract.make_extract, ExtractOptions())
    counts = run_map_stage(stage, [tmp_path], tmp_path.with_suffix(".out")).counts
    assert (counts.documents_kept, counts.dropped) == (1, {"too complex to parse": 1})


@pytest.mark.few(9)
@pytest.mark.parametrize("hostile", [
    "<" * 300_000, "<a " * 100_000, '<a "' * 100_000, "<!--" * 100_000, "<script>" + "</script " * 50_000,
    "<div>" * 100_000, "<nav>" * 100_000, " " * 300_000, "<main><header>" * 50_000, "<div class=sidebar>" * 100_000,
    "<p><b><i>" * 30_000, "<?xml?>" + "<![CDATA[" * 50_000, "<?xml?>" + "<a b='" * 50_000,
    "<html><aside>x</aside>" * 50_000, f"<p {DISTINCT}>", "<a" + " " * 300_000, "<a" + "=" * 300_000,
], ids=range(17))
def test_no_page_takes_long(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quadratic in any of these, outside of the parser, does not come to its end here."""
    monkeypatch.setattr(extract, "_SECONDS", 0.5)
    for extractor in EXTRACTORS:
        for html in ("all", "detect"):
            extract.make_extract(ExtractOptions(extractor, html))(Document(hostile))


def archived(name: str, content: bytes) -> bytes:
    if name.endswith((".warc", ".wet")):
        return b"WARC/1.0\r\nWARC-Type: conversion\r\nContent-Length: 20\r\n\r\n" + content
    file = io.BytesIO()
    if name.endswith(".zip"):
        with zipfile.ZipFile(file, "w") as zipped:
            zipped.writestr("a.html", content)
    else:
        with tarfile.open(fileobj=file, mode="w:gz" if name.endswith("gz") else "w") as tar:
            member = tarfile.TarInfo("a.html")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return file.getvalue()


@pytest.mark.parametrize("format", ["html", "text", "urls"])
@pytest.mark.parametrize("name", ["a.warc", "a.wet", "a.tar", "a.tar.gz", "a.tgz", "a.zip"])
def test_an_archive_is_not_read_as_one_document(tmp_path: Path, name: str, format: str) -> None:
    (tmp_path / name).write_bytes(archived(name, PAGE.encode()))
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(DataError, match=rf"{name}: expected one file of --format {format}, found \w+ data"):
            find_source_files([path], format)


@pytest.mark.parametrize("page", ["t.html", "y.html.gz", "folder/t.xhtml", "t.txt"])
@pytest.mark.parametrize("kind", ["a.warc", "a.warc.gz", "a.tar", "a.tgz", "a.zip"])
def test_an_archive_under_the_name_of_a_page_is_not_text(tmp_path: Path, kind: str, page: str) -> None:
    content = archived(kind.removesuffix(".gz"), PAGE.encode())
    path = tmp_path / page
    path.parent.mkdir(exist_ok=True)
    for suffix in (kind, page):
        content = gzip.compress(content) if suffix.endswith(".gz") else content
    path.write_bytes(content)
    stage = MapStage("extract", extract.make_extract, ExtractOptions())
    with pytest.raises(DataError, match=rf"{page} expected one document, found \w+ data; .*unpack"):
        run_map_stage(stage, [tmp_path], tmp_path.with_suffix(".strict"))
    (tmp_path / "good.html").write_text(PAGE)
    counts = run_map_stage(stage, [tmp_path], tmp_path.with_suffix(".skip"), WebReadOptions(on_error="skip")).counts
    assert (counts.documents_in, counts.documents_kept, counts.dropped) == (2, 1, {"not text": 1})
