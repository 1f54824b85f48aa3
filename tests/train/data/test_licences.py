"""Which licences let a text into shipped weights."""

from email.message import Message

import pytest

from headrace.train.data.licences import is_permissive, names_copyleft, package_licence


@pytest.mark.parametrize(
    "expression",
    [
        "MIT", "mit", "Apache-2.0", "BSD License", "PSF-2.0", "MIT OR GPL-3.0-only", "GPL-2.0-only OR (MIT AND ISC)",
        "Apache-2.0 AND Apache-2.0 WITH LLVM-exception AND BSD-2-Clause", "(MIT)", "MIT-CMU", "Apache  License 2.0",
    ],
)  # fmt: skip
def test_permissive_licences_are_accepted(expression: str) -> None:
    assert is_permissive(expression)


@pytest.mark.parametrize(
    "expression",
    [
        "", "GPL-3.0-only", "LGPLv3", "AGPL-3.0-or-later", "MPL-2.0", "MPL-2.0 AND MIT", "MIT AND GPL-2.0-only",
        "(MIT OR GPL-2.0-only) AND GPL-3.0-only", "Proprietary", "MIT AND", "MIT GPL", "MIT/GPL", "()",
        "GPL-2.0-only WITH Classpath-exception-2.0",
    ],
)  # fmt: skip
def test_all_others_are_refused(expression: str) -> None:
    assert not is_permissive(expression)


def metadata(*fields: tuple[str, str]) -> Message:
    message = Message()
    for name, value in fields:
        message[name] = value
    return message


@pytest.mark.parametrize(
    ("fields", "name", "is_accepted"),
    [
        ([("License-Expression", "MIT"), ("Classifier", "License :: OSI Approved :: GPL")], "MIT", True),
        ([("Classifier", "License :: OSI Approved :: MIT License")], "MIT License", True),
        ([("Classifier", "License :: OSI Approved"), ("License", "BSD")], "BSD", True),
        (
            [("Classifier", "License :: OSI Approved :: MIT License"), ("License", "LGPLv3")],
            "MIT License",
            False,
        ),
        (
            [
                ("Classifier", "License :: OSI Approved :: MIT License"),
                ("Classifier", "License :: OSI Approved :: GNU General Public License v3 (GPLv3)"),
            ],
            "MIT License AND GNU General Public License v3 (GPLv3)",
            False,
        ),
        ([("License", "GPL")], "GPL", False),
        ([("License", "Permission is granted " * 20)], "unknown", False),
        ([], "unknown", False),
    ],
)
def test_the_licence_of_a_package_is_the_most_exact_statement(
    fields: list[tuple[str, str]], name: str, is_accepted: bool
) -> None:
    licence = package_licence(metadata(*fields))
    assert (licence.name, licence.is_accepted) == (name, is_accepted)


@pytest.mark.parametrize(
    "text",
    [
        "under the terms of the GNU General Public License as", "GNU Lesser\nGeneral  Public\nLicence", "GPLv3",
        "# SPDX-License-Identifier: LGPL-2.1-or-later", "released as GPL-2.0", "AGPL v3",
    ],
)  # fmt: skip
def test_a_text_that_names_a_copyleft_licence_is_found(text: str) -> None:
    assert names_copyleft(text)


@pytest.mark.parametrize("text", ["MIT License", "a general public", "import gplot", "gpl2x", ""])
def test_other_text_is_not(text: str) -> None:
    assert not names_copyleft(text)
