"""`urls`: drop documents by their address, before any work on their text.

Dropped: malformed and too short addresses, blacklisted domains and extensions, and (in a second pass, dedup.py) all but
the first document of an address. Documents without an address stay. Addresses are equal if host (ignoring case and
`www.`), port, path and query are; scheme and fragment are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from data.storage import DataError
from data.webtext.documents import Document, DocumentFunction, DroppedDocument

_FORBIDDEN = re.compile(r"[\s\x00-\x20\x7f<>\"{}|\\^`]")
_LABEL = re.compile(r"[^\W_](?:[\w-]{0,61}[^\W_])?")

# Domains with little running text (including subdomains), and extensions of files that are not pages.
DOMAINS = frozenset("""
    500px.com akamaihd.net aliexpress.com amazonaws.com artstation.com bandcamp.com bit.ly buff.ly cloudfront.net
    dailymail.co.uk dailymotion.com deviantart.com discord.com discord.gg dropbox.com ebay.com etsy.com
    facebook.com fb.com fb.me flickr.com gfycat.com giphy.com gofundme.com goo.gl hulu.com imgflip.com imgur.com
    instagram.com is.gd itch.io justpaste.it kickstarter.com linkedin.com liveleak.com mega.nz memegenerator.net
    mixcloud.com netflix.com onlyfans.com ow.ly paypal.com photobucket.com pinimg.com pinterest.com pixiv.net
    pornhub.com prntscr.com puu.sh quickmeme.com redd.it reddit.com redgifs.com redtube.com sli.mg slideshare.net
    snapchat.com soundcloud.com spotify.com steamcommunity.com steampowered.com streamable.com t.co t.me
    telegram.me tiktok.com tinypic.com tinyurl.com tumblr.com twitch.tv twitter.com vimeo.com vine.co vk.com
    weibo.com whatsapp.com x.com xhamster.com xnxx.com xvideos.com youtu.be youtube.com
""".split())
EXTENSIONS = frozenset("""
    .3gp .7z .aac .apk .avi .bin .bmp .bz2 .css .csv .deb .dmg .doc .docx .eot .epub .exe .flac .flv .gif .gifv
    .gz .ico .iso .jar .jpeg .jpg .js .json .m3u8 .m4a .m4v .mid .mkv .mov .mp3 .mp4 .mpeg .mpg .msi .ods .odt
    .ogg .ogv .otf .pdf .png .ppt .pptx .ps .rar .rpm .rss .svg .swf .tar .tgz .tif .tiff .torrent .ttf .wav .webm
    .webp .wma .wmv .woff .woff2 .xls .xlsx .xml .xz .zip .zst
""".split())


@dataclass(frozen=True)
class UrlOptions:
    domains: tuple[str, ...] = tuple(sorted(DOMAINS))
    extensions: tuple[str, ...] = tuple(sorted(EXTENSIONS))
    shortest: int = 9
    """Minimum length in characters; `http://a` is not a page."""


def read_blacklist(path: str) -> tuple[str, ...]:
    """Entries of a blacklist file: one per line, `#` begins a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot read: {getattr(error, 'strerror', None) or error}") from error
    return tuple(sorted({entry.lower() for line in lines if (entry := line.partition("#")[0].strip())}))


def make_url_filter(options: UrlOptions) -> DocumentFunction:
    domains, extensions = frozenset(options.domains), frozenset(options.extensions)

    def check(document: Document) -> Document | DroppedDocument:
        url = document.url
        if url is None:
            return document
        if len(url) < options.shortest:
            return DroppedDocument("short URL")
        parts = split_url(url)
        if parts is None:
            return DroppedDocument("malformed URL")
        labels = str(parts.hostname).removesuffix(".").split(".")
        if any(".".join(labels[k:]) in domains for k in range(len(labels))):
            return DroppedDocument("blacklisted domain")
        name = parts.path.rpartition("/")[2].lower()
        if "." in name and name[name.rindex("."):] in extensions:
            return DroppedDocument("blacklisted extension")
        return document

    return check


def split_url(url: str) -> SplitResult | None:
    """The parts of a web address; None if it is malformed."""
    if _FORBIDDEN.search(url):
        return None
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port  # accessing the port validates it
    except ValueError:
        return None
    labels = host.removesuffix(".").split(".")
    if parts.scheme.lower() not in ("http", "https") or len(labels) < 2 or not all(map(_LABEL.fullmatch, labels)):
        return None
    return parts


def normalized_url(url: str) -> str:
    """Equal for different spellings of one address."""
    parts = split_url(url)
    if parts is None:
        return url
    host = str(parts.hostname).removesuffix(".").removeprefix("www.")
    return f"{host}:{parts.port or ''}{parts.path.rstrip('/')}?{parts.query}"
