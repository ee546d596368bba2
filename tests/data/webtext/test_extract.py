"""HTML pages: their character set and their text are those that a browser shows, however the page is written."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

from data.storage import UsageError
from data.webtext import extract
from data.webtext.__main__ import main
from data.webtext.documents import Document, DocumentError, DroppedDocument
from data.webtext.extract import EXTRACTORS
from data.webtext.readers import WebReadOptions, find_source_files, plan_units, read_unit
from data.webtext.runner import MapStage, read_stage_record, run_map_stage
from tests.data.webtext.test_filters import GOOD


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
    "XML": '<?xml version="1.0"?><!-- x --><!DOCTYPE html PUBLIC "-//W3C//DTD XHTML 1.0//EN"><html><head><title/>'
           '<script src="a/b>c.js"/></head><body><a id="top"/>{}</body></html>',
}
CONSTRUCTS = {  # between two paragraphs: a piece of HTML, what is shown of it, and what is not
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
    "MathML": ("<math><semantics><mi>x</mi><annotation>HIDDEN</annotation></semantics></math>", "x", "HIDDEN"),
    "ruby": ("<ruby>\u6f22<rp>(</rp><rt>kan</rt><rp>)</rp></ruby>", "\u6f22(kan)", ""),
    "footnotes": ("<aside class=footnote role=note>one</aside>", "one", ""),
    "list of links": ("<ul><li><a href=/>one</a><li><a href=/>two</a></ul>", "one two", ""),
}
SWALLOWS = {"a tag that never ends": "the rest of the page is its attribute"}


@pytest.mark.parametrize(("construct", "number"), [(name, number) for number, name in enumerate(CONSTRUCTS)])
def test_what_a_browser_shows_is_kept(construct: str, number: int) -> None:
    """Each construct by each extractor in three contexts; each context is tried with some constructs."""
    markup, shown, hidden = CONSTRUCTS[construct]
    for extractor, step in product(EXTRACTORS, (0, 5, 9)):
        context = [*CONTEXTS][(number + step) % len(CONTEXTS)]
        page = CONTEXTS[context].format(f"<p>Before it.</p>{markup}<p>After it.</p>")
        found = extract.make_extract(extractor)(Document(page))
        assert isinstance(found, Document)
        text = found.text if "\n" in shown else " ".join(found.text.replace("\u2022", " ").split())  # lists have signs
        expected = ["Before it.", shown, *([] if construct in SWALLOWS else ["After it."])]
        # without styles, all that could be shown
        is_shown = context == "shown by a script" and construct in ("hidden elements", "dialogs")
        at = 0
        for part in expected[:1] if is_shown else expected:
            at = text.find(part, at)
            assert at >= 0, (context, part, found.text)
        assert is_shown or not hidden or hidden not in found.text


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_the_text_of_a_page_in_paragraphs(extractor: str) -> None:
    found = extract.make_extract(extractor)(Document(PAGE, "u", {"a": 1}))
    assert found == Document("A & B\n\nFirst paragraph, one line.\n\nSecond\xa0one <b>\n\n  \u2022 one\n  \u2022 two\n"
                             "a\n  b", "u", {"a": 1})


def test_the_main_content_is_without_what_is_around_it() -> None:
    for page in ("<div class=navbar>{}</div>", "<div role=navigation>{}</div>", "<div class='left sidebar'>{}</div>",
                 "<ul class=menu><li>{}</ul>", "<div id=footer>{}</div>", "<a class=headerlink>{}</a>"):
        document = Document(f"<html><body><p>Text.</p>{page.format('AROUND')}</body></html>")
        main, everything = (extract.make_extract(extractor)(document) for extractor in EXTRACTORS)
        assert main == Document("Text.") and isinstance(everything, Document) and "AROUND" in everything.text


@pytest.mark.parametrize("extractor", EXTRACTORS)
def test_only_pages_are_touched(extractor: str) -> None:
    function = extract.make_extract(extractor)
    for text in (GOOD, "a < b and <b>bold</b>", "html", "<p>a fragment in an article about HTML</p>", "",
                 "<!-- a comment --> and no page", "<header file>"):
        assert function(Document(text)) == Document(text)
    assert function(Document("<p>x", None, {"file": "b", "format": "html"})) == Document("x", None, {"file": "b"})
    for page in (Document("\ufeff \n<!doctype HTML><p>x"), Document("<!-- a\n-->\n<!--><html><p>x"),
                 Document("<html lang=en><body>x"), Document('<?xml version="1.0"?>\n<html><body>x</body></html>')):
        assert function(page) == Document("x", None, page.meta)
    assert function(Document("<html><script>1</script></html>")) == DroppedDocument("no text in the page")
    assert extract.make_extract(extractor, "all")(Document("<p>x</p>")) == Document("x")
    assert extract.make_extract(extractor, "none")(Document(PAGE)) == Document(PAGE)


DISTINCT = " ".join(f"a{k}=x" for k in range(100_000))
COMPLEX = {  # quadratic in the parser: each would take minutes or many GB
    "attributes of one tag": f"<p {DISTINCT}>",
    "formatting closed late": "<b>" + "<div>" * 100_000 + "</b>" * 100_000,
    "indentation": "<ul><li>x" * 100_000,
}


@pytest.mark.parametrize("markup", COMPLEX.values(), ids=COMPLEX)
def test_a_page_that_is_too_complex_is_counted_by_its_reason(tmp_path, monkeypatch, markup):
    monkeypatch.setattr(extract, "_SECONDS", 0.5)
    (tmp_path / "a.html").write_text(f"<html><p>one</p>{markup}")
    (tmp_path / "b.html").write_text(PAGE + "<p>x" * 3000)
    stage = MapStage("extract", extract.make_extract, {})
    counts = run_map_stage(stage, [tmp_path], tmp_path.with_suffix(".out")).counts
    assert (counts.documents_kept, counts.dropped) == (1, {"too complex to parse": 1})


@pytest.mark.parametrize("hostile", [
    '<a "' * 100_000, "<!--" * 100_000, "<script>" + "</script " * 50_000, "<main><header>" * 50_000,
    "<?xml?>" + "<a b='" * 50_000, "<a" + " " * 300_000], ids=range(6))
def test_no_page_takes_long(hostile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quadratic in any of these, outside of the parser, does not come to its end here."""
    monkeypatch.setattr(extract, "_SECONDS", 0.5)
    for extractor in EXTRACTORS:
        for html in ("all", "detect"):
            extract.make_extract(extractor, html)(Document(hostile))


# ------------------------------------------------------------------------------------------------------- character sets

RUSSIAN = "Кот спал весь день на тёплой крыше"
WESTERN = "The “café” – naïve, 5 €"
CHINESE = "猫在温暖的屋顶上睡了一整天"
JAPANESE = "猫は一日中、暖かい屋根の上で眠っていた"
KOREAN = "고양이는 하루 종일 따뜻한 지붕 위에서 잤다"
GREEK = "Η γάτα κοιμόταν όλη μέρα"
HEBREW = "החתול ישן כל היום"


def read_page(folder: Path, page: bytes,
              reading: WebReadOptions = WebReadOptions()) -> tuple[str, tuple[str, ...]] | DocumentError:
    """Text and repairs, or what is wrong with it."""
    (folder / "a.html").write_bytes(page)
    (read,) = (read for unit in plan_units(find_source_files([folder / "a.html"])[0], 1 << 20)
               for read in read_unit(unit, reading))
    return read.value if isinstance(read.value, DocumentError) else (read.value.text, read.repairs)


def page_of(text: str, codec: str, head: str = "") -> bytes:
    return f"<!doctype html><html><head>{head}</head><body><p>{text}</p></body></html>".encode(codec)


LABELS = [
    ("UTF8", "utf-8", JAPANESE), ("utf-16", "utf-8", RUSSIAN), ("latin1", "cp1252", WESTERN),
    ("x-user-defined", "cp1252", WESTERN), ("cp1251", "cp1251", RUSSIAN), ("iso-8859-8-i", "iso8859-8", HEBREW),
    ("macintosh", "mac-roman", "naïve “café”"),
    ("gb2312", "gbk", "朱镕基" + CHINESE), ("gb2312", "gb18030", "𠀀㐀" + CHINESE), ("big5-hkscs", "big5hkscs", "啲嘢"),
    ("Shift_JIS", "cp932", JAPANESE + "①㈱"), ("windows-31j", "cp932", "～－①"), ("euc-jp", "euc_jp", JAPANESE),
    ("iso-2022-jp", "iso2022_jp", JAPANESE), ("ks_c_5601-1987", "cp949", "똠방각하 펲시콜라")]


def test_a_label_means_what_it_means_to_browsers(tmp_path: Path) -> None:
    for label, codec, text in LABELS:
        for head in (f"<meta charset={label}>",
                     f'<META content="text/html; charset={label}" HTTP-EQUIV="Content-Type" />'):
            page = page_of(text, codec, head)
            assert read_page(tmp_path, page) == (page.decode(codec), ()), label


DECLARATIONS = [
    "<META CHARSET='WINDOWS-1251'/>", "<meta\ncharset\n=\nwindows-1251\n>", '<meta charset=" windows-1251 ">',
    '<meta http-equiv="Content-Type" content="text/html; charset=windows-1251">',
    "<meta http-equiv=CONTENT-TYPE content='charset = \"windows-1251\"; x'>",
    '<meta name=a content="text/html; charset=koi8-r"><meta charset=windows-1251>',
    "<!-- <meta charset=koi8-r> --><meta charset=windows-1251>",
    '<link title="<meta charset=koi8-r>"><meta charset=windows-1251>', "<meta charset=unheard><meta charset=x-cp1251>",
    "<meta charset=windows-1251 charset=koi8-r><meta charset=koi8-r>",
    '<meta http-equiv=content-type content="text/html; charset=koi8-r" charset=windows-1251>',
    "<style>" + "p {}" * 500 + "</style>\n<meta charset=windows-1251>",
    "<meta name=x content='" + "x" * 980 + "'><meta charset=windows-1251>",
    "<script>" + " " * 1200 + "'<meta charset=koi8-r>'</script><meta charset=windows-1251>"]


def test_a_page_says_its_character_set_in_many_ways(tmp_path: Path) -> None:
    for head in DECLARATIONS:
        page = page_of(RUSSIAN, "cp1251", head)
        assert read_page(tmp_path, page) == (page.decode("cp1251"), ()), head


NO_DECLARATIONS = [
    "", '<meta content="text/html; charset=windows-1251">', "<meta name=charset content=windows-1251>",
    "<p title='<meta charset=windows-1251>'>", "<!-- <meta charset=windows-1251> -->", "<meta charset=cp936>",
    "<meta http-equiv=content-type content='text/html; charset=\"windows-1251'>", "<meta charset=\u00e9>"]


def test_what_only_looks_like_a_declaration_is_none(tmp_path: Path) -> None:
    for head in NO_DECLARATIONS:
        found = read_page(tmp_path, page_of(RUSSIAN, "cp1251", head.encode().decode("cp1251")))
        assert isinstance(found, DocumentError) and found.reason == "no character set" and "--charset" in str(found)
        page = page_of(RUSSIAN, "utf-8", head)
        assert read_page(tmp_path, page) == (page.decode(), ())


@pytest.mark.parametrize(("label", "codec", "declaration"), [
    ("windows-1251", "cp1251", '<?xml version="1.0" encoding="{}"?>'),
    ("utf-16", "utf-8", "<?xml\nversion='1.0'\nencoding = '{}'\n?>")])
def test_the_declaration_of_xml_counts_where_no_meta_does(tmp_path, declaration, label, codec):
    page = declaration.format(label).encode() + page_of(RUSSIAN, codec)
    assert read_page(tmp_path, page) == (page.decode(codec), ())
    other = "koi8-r" if codec == "cp1251" else "cp1251"
    page = declaration.format(label).encode() + page_of(RUSSIAN, other, f"<meta charset={other}>")
    assert read_page(tmp_path, page) == (page.decode(other), ())


MARKS = [("utf-8", b"\xef\xbb\xbf"), ("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")]


def test_the_mark_is_before_the_server_and_the_server_before_the_page(tmp_path: Path) -> None:
    for (codec, mark), says, server in product(
            MARKS, ("", "<meta charset=windows-1251>", "<meta charset=utf-16>"), (None, "windows-1251", "utf-16le")):
        page = page_of(RUSSIAN, codec, says)
        assert read_page(tmp_path, mark + page, WebReadOptions(charset=server)) == (page.decode(codec), ())
        if server == "windows-1251":
            page = page_of(RUSSIAN, "cp1251", says)
            assert read_page(tmp_path, page, WebReadOptions(charset=server)) == (page.decode("cp1251"), ())
    for codec, start in product(("utf-16-le", "utf-16-be"), ("", '<?xml version="1.0"?>')):  # without a mark
        page = start.encode(codec) + page_of(CHINESE, codec, "<meta charset=utf-16>")
        assert read_page(tmp_path, page) == (page.decode(codec), ())


@pytest.mark.parametrize(("label", "codec", "text", "reason"), [
    ("utf-8", "utf-8", RUSSIAN, "not UTF-8"),
    ("gb2312", "gbk", CHINESE, "not gbk"), ("euc-kr", "euc_kr", KOREAN, "not euc-kr"),
    ("big5", "big5", "貓在溫暖的屋頂上", "not big5"), ("euc-jp", "euc_jp", JAPANESE, "not euc-jp")])
def test_a_malformed_byte_is_one_mark_as_on_the_screen_and_is_counted(tmp_path, label, codec, text, reason):
    page, reading = page_of(text, codec, f"<meta charset={label}>"), WebReadOptions(on_error="skip")
    for bad in (b"\xff", b"\x81", b"\xfe"):
        assert read_page(tmp_path, page.replace(b"</p>", bad + b"</p>"), reading) == (
            page.decode(codec).replace("</p>", "\ufffd</p>"), (reason,)), "the tag after it is whole"
    cut = page[:page.index(b"</p>") - 1]  # a page cut off inside its last character
    assert read_page(tmp_path, cut, reading) == (page.decode(codec).partition("</p>")[0][:-1] + "\ufffd", (reason,))


@pytest.mark.parametrize(("raw", "text", "repairs"), [
    ("It’s “quoted” – café".encode("cp1252"), "It’s “quoted” – café", ("no character set",)),
    ("Le garçon à l’été, élève créé".encode("cp1252"), "Le garçon à l’été, élève créé", ("no character set",)),
    (b"one \xe9", "one é", ("no character set",)),
    (f"{RUSSIAN} и ".encode() + b"\xff. " + b"x" * 100, f"{RUSSIAN} и \ufffd. " + "x" * 100, ("not UTF-8",)),
    (RUSSIAN.encode()[:-1], RUSSIAN[:-1] + "\ufffd", ("not UTF-8",)),
    ("naïve café".encode() + b"\xe2\x80", "naïve café\ufffd", ("not UTF-8",)),
])
def test_a_page_that_says_nothing_is_utf_8_where_most_of_it_is_else_windows_1252(tmp_path, raw, text, repairs):
    assert read_page(tmp_path, b"<p>" + raw) == (f"<p>{text}", repairs)


@pytest.mark.parametrize(("text", "codec"), [
    (RUSSIAN, "cp1251"), (RUSSIAN, "koi8-r"), (GREEK, "cp1253"), (JAPANESE, "cp932"), (CHINESE, "gbk"),
    (KOREAN, "euc_kr"), (HEBREW, "cp1255")])
def test_letters_of_another_script_are_not_taken_for_windows_1252_unless_asked(tmp_path, text, codec):
    page = page_of(text, codec)
    for on_error in ("strict", "skip"):
        found = read_page(tmp_path, page, WebReadOptions(on_error=on_error))
        assert isinstance(found, DocumentError) and found.reason == "no character set"
    assert read_page(tmp_path, page, WebReadOptions(on_error="replace")) != found
    label = {"cp932": "shift_jis", "cp1251": "windows-1251", "cp1253": "windows-1253", "cp1255": "windows-1255"}
    assert read_page(tmp_path, page, WebReadOptions(charset=label.get(codec, codec.replace("_", "-")))) == (
        page.decode(codec), ())


def test_what_is_no_text_or_what_no_browser_reads_is_a_fault_that_says_so(tmp_path: Path) -> None:
    for page in (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff", b"\xff\xd8\xff\xe0\0\x10JFIF\0", b"PK\x03\x04\x14\0\xe9"):
        for on_error in ("strict", "skip", "replace"):
            found = read_page(tmp_path, page, WebReadOptions(on_error=on_error))
            assert isinstance(found, DocumentError) and found.reason == "not text"
    for label in ("hz-gb-2312", "ISO-2022-CN", "csiso2022kr"):
        text = f"<meta charset={label}><p>text"
        found = read_page(tmp_path, text.encode())
        assert isinstance(found, DocumentError) and found.reason == "refused character set" and "iconv" in str(found)
        assert read_page(tmp_path, text.encode(), WebReadOptions(charset="utf-8")) == (text, ())
    for codec, server in product(("utf-32", "utf-32-be"), (None, "utf-8")):  # not taken for UTF-16
        text = "\ufeff" * (codec != "utf-32") + f"<p>{RUSSIAN}"
        found = read_page(tmp_path, text.encode(codec), WebReadOptions(charset=server))
        assert isinstance(found, DocumentError) and found.reason == "refused character set" and "UTF-32" in str(found)


def test_the_server_s_word_is_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.html").write_bytes(page_of(RUSSIAN, "cp1251"))
    main(["read", str(tmp_path / "a.html"), "--output", str(tmp_path / "out"), "--charset", "CP1251"])
    assert RUSSIAN in (tmp_path / "out" / "part-00000.jsonl").read_text()
    record = read_stage_record(tmp_path / "out" / "stage.json")
    assert record and record.key["parameters"]["reading"]["charset"] == "windows-1251"
    for label in ("cp-unheard-of", "iso-2022-kr", ""):
        expected = f"--charset: expected a character set (such as windows-1251), found {label!r}"
        with pytest.raises(UsageError, match=re.escape(expected)):
            main(["read", str(tmp_path), "--output", str(tmp_path / "out"), "--charset", label])
