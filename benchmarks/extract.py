"""What HTML extractors keep of Debian's manuals, which exist as pages and as plain text.

    apt-get download debian-faq debian-policy debian-reference-en debmake-doc developers-reference \\
        installation-guide-amd64 maint-guide && for deb in *.deb; do dpkg -x "$deb" manuals; done
    python benchmarks/extract.py manuals

For each manual the words (with their counts) of all its pages are compared with those of its plain text. Recall is the
share of the plain text's words that the pages' text has, precision the share of the pages' words that the plain text
has; the last line is the mean over the manuals, and the speed on one core. `main_content=True` is resiliparse with its
own rules. trafilatura is left out where it is not installed.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

MANUALS = {  # plain text, pages (of one language; no copies under a second name)
    "debian-faq": ("doc/debian/FAQ/debian-faq.en.txt.gz", "doc/debian/FAQ/*.en.html"),
    "debian-policy": ("doc/debian-policy/policy.txt.gz", "doc/debian-policy/policy.html/*.html"),
    "menu-policy": ("doc/debian-policy/menu-policy.txt.gz", "doc/debian-policy/menu-policy.html/*.html"),
    "perl-policy": ("doc/debian-policy/perl-policy.txt.gz", "doc/debian-policy/perl-policy.html/*.html"),
    "debian-reference": ("debian-reference/debian-reference.en.txt.gz", "debian-reference/*.en.html"),
    "debmake-doc": ("doc/debmake-doc/debmake-doc.en.txt.gz", "doc/debmake-doc/html/*.en.html"),
    "developers-reference": ("developers-reference/developers-reference.txt.gz", "developers-reference/*.html"),
    "installation-guide": ("doc/installation-guide-amd64/en/install.en.txt.gz",
                           "doc/installation-guide-amd64/en/*.html"),
    "maint-guide": ("doc/maint-guide/maint-guide.en.txt.gz", "doc/maint-guide/html/*.en.html"),
}
LEFT_OUT = ("search.html", "genindex.html", "developers-reference.html")  # no text; all chapters once more
_WORD = re.compile(r"\w+")

Extractor = Callable[[str], str]


def extractors() -> dict[str, Extractor]:
    from data.webtext import extract
    from data.webtext.documents import Document

    def ours(name: str) -> Extractor:
        function = extract.make_extract(name, "all")
        return lambda page: getattr(function(Document(page)), "text", "")

    from resiliparse.extract.html2text import extract_plain_text

    found = {name: ours(name) for name in extract.EXTRACTORS}
    found["main_content=True"] = lambda page: extract_plain_text(page, main_content=True, alt_texts=False)
    try:
        import trafilatura
        found["trafilatura"] = lambda page: trafilatura.extract(page) or ""
    except ImportError:
        pass
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="where the packages were unpacked")
    folder = parser.parse_args().folder / "usr/share"
    manuals = {name: (gzip.decompress((folder / text).read_bytes()).decode(),
                      [page.read_text("utf-8", "replace") for page in sorted(folder.glob(pages))
                       if page.name not in LEFT_OUT])
               for name, (text, pages) in MANUALS.items() if (folder / text).exists()}
    print(f"{sum(len(pages) for _, pages in manuals.values())} pages of {len(manuals)} manuals")
    for name, extractor in extractors().items():
        print(f"\n{name:22}recall  precision")
        recalls, precisions, size, seconds = [], [], 0, 0.0
        for manual, (reference, pages) in manuals.items():
            start = sum(os.times()[:4])  # with that of processes that it has started
            texts = [extractor(page) for page in pages]
            seconds += sum(os.times()[:4]) - start
            size += sum(map(len, pages))
            expected = Counter(_WORD.findall(reference.lower()))
            found = Counter(word for text in texts for word in _WORD.findall(text.lower()))
            common = (expected & found).total()
            recalls.append(common / expected.total())
            precisions.append(common / max(1, found.total()))
            print(f"{manual:22}{recalls[-1]:6.3f}  {precisions[-1]:9.3f}")
        print(f"{'mean':22}{sum(recalls) / len(recalls):6.3f}  {sum(precisions) / len(precisions):9.3f}"
              f"  {size / seconds / 1e6:.1f} MB/s")


if __name__ == "__main__":
    main()
