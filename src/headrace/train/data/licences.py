"""Decides whether the licence of a text lets a model trained on it be shipped: permissive ones do, all others do not.

A licence must be recognised to be accepted. Anything of the GPL family is refused wherever it is named: in the
metadata of a package, in the metadata of a package vendored inside it, or in the text of a single file.
"""

import re
from collections.abc import Sequence
from email.message import Message
from typing import NamedTuple

PERMISSIVE = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0",
        "CC-BY-4.0", "CC0-1.0", "HPND", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "PostgreSQL", "Public-Domain",
        "Python-2.0", "Unlicense", "Zlib",
    }
)  # fmt: skip
"""Licences, spelled as SPDX does, whose text may go into shipped weights."""

_SPELLINGS = {
    "apache 2": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache license 2.0": "Apache-2.0",
    "apache license, version 2.0": "Apache-2.0",
    "apache license version 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "apache-2": "Apache-2.0",
    "bsd": "BSD-3-Clause",
    "bsd license": "BSD-3-Clause",
    "bsd 2-clause license": "BSD-2-Clause",
    "bsd 3-clause license": "BSD-3-Clause",
    "3-clause bsd license": "BSD-3-Clause",
    "new bsd license": "BSD-3-Clause",
    "cc0 1.0 universal (cc0 1.0) public domain dedication": "CC0-1.0",
    "historical permission notice and disclaimer (hpnd)": "HPND",
    "isc license": "ISC",
    "isc license (iscl)": "ISC",
    "mit license": "MIT",
    "mit no attribution license (mit-0)": "MIT-0",
    "psf": "PSF-2.0",
    "public domain": "Public-Domain",
    "python software foundation license": "PSF-2.0",
    "the unlicense (unlicense)": "Unlicense",
    "zlib/libpng license": "Zlib",
}
_BY_FOLDED_NAME = {name.lower(): name for name in PERMISSIVE} | _SPELLINGS
_COPYLEFT = re.compile(
    r"general\s+public\s+licen[cs]e|SPDX-License-Identifier:[^\n]*GPL|\b[al]?gpl[ -]?v?[123]\b", re.IGNORECASE
)
_LONGEST_NAME = 200  # some packages put the whole text of a licence where its name belongs
_CLASSIFIER = "License :: "


class Licence(NamedTuple):
    """What was found out about a text's licence.

    Attributes:
        name: as stated; "unknown" where nothing is.
        evidence: where it is stated.
        is_accepted: whether it is permissive as a whole.
    """

    name: str
    evidence: str
    is_accepted: bool


def is_permissive(expression: str) -> bool:
    """Return whether an SPDX expression, or a usual name, allows shipping: AND needs both sides, OR one.

    Examples: "MIT OR GPL-3.0-only" does, "MIT AND GPL-3.0-only" does not, "MPL-2.0" does not, "" does not.
    """
    folded = " ".join(expression.split()).lower()
    if folded in _BY_FOLDED_NAME:
        return True
    alternatives = _split_outside_brackets(folded, " or ")
    if len(alternatives) > 1:
        return any(map(is_permissive, alternatives))
    parts = _split_outside_brackets(folded, " and ")
    if len(parts) > 1:
        return all(map(is_permissive, parts))
    return folded.startswith("(") and folded.endswith(")") and is_permissive(folded[1:-1])


def package_licence(metadata: Message) -> Licence:
    """Return the licence of an installed package, from the first of its expression, classifiers and licence field."""
    expression = metadata.get("License-Expression")
    if expression:
        return Licence(expression, "License-Expression", is_permissive(expression))
    classifiers = [
        text.split(" :: ")[-1] for text in metadata.get_all("Classifier", []) if text.startswith(_CLASSIFIER)
    ]
    classifiers = [name for name in classifiers if name != "OSI Approved"]
    stated = (metadata.get("License") or "").strip()
    if classifiers:
        # several classifiers do not say whether all or one of them applies, so all must be permissive
        is_accepted = all(map(is_permissive, classifiers)) and not names_copyleft(stated)
        return Licence(" AND ".join(classifiers), "Classifier", is_accepted)
    if stated and len(stated) <= _LONGEST_NAME:
        return Licence(stated, "License", is_permissive(stated))
    return Licence("unknown", "no licence that is a name", False)


def names_copyleft(text: str) -> bool:
    """Return whether a text names a licence of the GPL family; one that only talks about it is caught as well."""
    return _COPYLEFT.search(text) is not None


def _split_outside_brackets(expression: str, word: str) -> Sequence[str]:
    parts, depth, start = [], 0, 0
    for index, character in enumerate(expression):
        depth += (character == "(") - (character == ")")
        if depth == 0 and expression.startswith(word, index):
            parts.append(expression[start:index])
            start = index + len(word)
    return [*parts, expression[start:]]
