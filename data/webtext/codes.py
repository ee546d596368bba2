"""Codes of languages: the one that a word probably means (`meant`), for whoever typed another.

Detectors use the two letters of ISO 639-1 where a language has them, in lower case, and three letters elsewhere.
"""

from __future__ import annotations

import difflib
import locale
import re
from collections.abc import Collection

LANGUAGE_CODE = "[a-z]{2,3}"

ISO_639_3_TO_1 = dict(pair.split(":") for pair in """
    afr:af alb:sq amh:am ara:ar arg:an arm:hy asm:as aze:az bak:ba baq:eu bel:be ben:bn bod:bo bos:bs bre:br bul:bg
    bur:my cat:ca ces:cs chi:zh cmn:zh cos:co cym:cy cze:cs dan:da deu:de dut:nl ell:el eng:en epo:eo est:et eus:eu
    fao:fo fas:fa fin:fi fra:fr fre:fr fry:fy geo:ka ger:de gla:gd gle:ga glg:gl gre:el guj:gu hat:ht hau:ha heb:he
    hin:hi hrv:hr hun:hu hye:hy ibo:ig ice:is ind:id isl:is ita:it jav:jv jpn:ja kan:kn kat:ka kaz:kk khm:km kin:rw
    kir:ky kor:ko kur:ku lao:lo lat:la lav:lv lit:lt ltz:lb mac:mk mal:ml mar:mr may:ms mkd:mk mlg:mg mlt:mt mon:mn
    msa:ms mya:my nep:ne nld:nl nno:nn nor:no oci:oc ori:or pan:pa per:fa pol:pl por:pt pus:ps que:qu ron:ro rum:ro
    rus:ru san:sa sin:si slk:sk slo:sk slv:sl som:so spa:es sqi:sq srp:sr swa:sw swe:sv tam:ta tat:tt tel:te tgk:tg
    tgl:tl tha:th tib:bo tuk:tk tur:tr uig:ug ukr:uk urd:ur uzb:uz vie:vi wel:cy wln:wa xho:xh yid:yi yor:yo zho:zh
    zul:zu""".split())

CODE_ALIASES = {"nb": "no", "iw": "he", "in": "id", "cn": "zh", "jp": "ja", "cz": "cs", "gr": "el", "dk": "da",
                "chinese": "zh", "hindi": "hi", "ukrainian": "uk", "persian": "fa", "farsi": "fa", "vietnamese": "vi",
                "indonesian": "id", "latin": "la", "bengali": "bn", "urdu": "ur"}
"""Older codes, and what is often taken for one; names that Python's table of locales has not."""


def closest_language_code(word: str, known: Collection[str] = ()) -> str | None:
    """The code that is probably meant; None where nothing is near. Without `known` codes, any."""
    lower = word.lower()
    first = re.split("[-_]", lower)[0]
    named = locale.locale_alias.get(first, "")[:2] if len(first) > 3 else ""
    for code in (lower if known else None, ISO_639_3_TO_1.get(first), CODE_ALIASES.get(first), named,
                 CODE_ALIASES.get(named), first):
        if code and re.fullmatch(LANGUAGE_CODE, code) and (code in known or not known):
            return code
    return None if len(first) < 3 else next(iter(difflib.get_close_matches(first, sorted(known), 1)), None)


def language_code_hint(word: str, known: Collection[str] = ()) -> str:
    """The end of an error line."""
    code = closest_language_code(word, known)
    return f"; did you mean {code!r}?" if code else f"; it knows {' '.join(sorted(known))}" if known else ""
