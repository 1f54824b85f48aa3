"""Finding text: order, licences, splits, and what is refused."""

import random
from pathlib import Path

import pytest

from headrace.core.errors import UserError
from headrace.train.data.corpus import Corpus, Document, collect, folder_source, package_sources, stdlib_source

LINE = "value = 1  # long enough to be taken, which needs sixty-four bytes or more\n"


def write(root: Path, **texts: str) -> Path:
    for name, text in texts.items():
        file = root / name.replace("__", "/").replace("_dot_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return root


def make_package(root: Path, name: str, licence: str, **texts: str) -> None:
    """Install a package into a folder: its files, its metadata and the list of its files."""
    write(root, **texts)
    files = [key.replace("__", "/").replace("_dot_", ".") for key in texts]
    info = root / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{licence}\n", encoding="utf-8")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]), encoding="utf-8")


def names(corpus: Corpus) -> list[str]:
    return [document.name for document in corpus.documents]


def test_documents_are_files_in_sorted_order(tmp_path: Path) -> None:
    root = write(
        tmp_path / "docs", b__x_dot_py=LINE + "b", a_dot_md=LINE + "a", b__a__z_dot_txt=LINE + "z", c_dot_png=LINE
    )
    corpus = collect([folder_source(root, "MIT")])
    assert names(corpus) == ["folder:docs:a.md", "folder:docs:b/a/z.txt", "folder:docs:b/x.py"]
    assert [document.group for document in corpus.documents] == ["folder:docs/a.md", "folder:docs/b", "folder:docs/b"]
    assert corpus.records[0].num_bytes == sum(len(document.text) for document in corpus.documents)


def test_the_order_does_not_depend_on_the_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    root = write(tmp_path / "docs", **{f"d{i}__f{j}_dot_py": f"{LINE}{i}{j}" for i in range(3) for j in range(3)})
    before = collect([folder_source(root, "MIT")])
    real = os.walk

    def shuffled(*arguments, **options):
        for folder, folders, files in real(*arguments, **options):
            random.shuffle(folders)
            random.shuffle(files)
            yield folder, folders, files

    monkeypatch.setattr(os, "walk", shuffled)
    for _ in range(5):
        again = collect([folder_source(root, "MIT")])
        assert names(again) == names(before)
        assert again.fingerprint == before.fingerprint


def test_hidden_short_and_repeated_files_are_left_out(tmp_path: Path) -> None:
    root = write(
        tmp_path, a_dot_py=LINE, b_dot_py=LINE, c_dot_py="x", _dot_git__x_dot_py=LINE + "g", _dot_h_dot_py=LINE
    )
    corpus = collect([folder_source(root, "MIT")])
    assert [name.partition(":")[2].partition(":")[2] for name in names(corpus)] == ["a.py"]
    assert corpus.records[0].left_out == {"same text as before": 1, "too short": 1}


def test_line_ends_and_a_byte_order_mark_are_made_alike(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(b"\xef\xbb\xbf" + (LINE * 2).replace("\n", "\r\n").encode())
    assert collect([folder_source(tmp_path, "MIT")]).documents[0].text == LINE * 2


def test_a_file_that_names_the_gpl_is_left_out(tmp_path: Path) -> None:
    root = write(tmp_path, a_dot_py=LINE, b_dot_py=f"# GNU General Public License\n{LINE}")
    corpus = collect([folder_source(root, "MIT")])
    assert len(corpus.documents) == 1
    assert corpus.records[0].left_out == {"names a copyleft licence": 1}


def test_an_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the corpus is empty"):
        collect([folder_source(tmp_path, "MIT")])
    with pytest.raises(UserError, match="the corpus is empty"):
        collect([])


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    write(tmp_path, a_dot_py=LINE)
    (tmp_path / "b.py").write_bytes(b"# caf\xe9\n" + LINE.encode())
    with pytest.raises(UserError, match=r"file .*b\.py of the corpus is not UTF-8 text \(byte 5\)"):
        collect([folder_source(tmp_path, "MIT")])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "gone.py").symlink_to(tmp_path / "nothing")
    with pytest.raises(UserError, match=r"file .*gone\.py of the corpus cannot be read: No such file"):
        collect([folder_source(tmp_path, "MIT")])


def test_a_folder_that_is_not_there_or_not_permissive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"folder .*none of the corpus does not exist"):
        folder_source(tmp_path / "none", "MIT")
    with pytest.raises(UserError, match=r"is said to be under 'GPL-3.0-only'"):
        folder_source(tmp_path, "GPL-3.0-only")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_package(
        tmp_path, "open_words", "License-Expression: MIT",
        open_words__b_dot_py=LINE + "b", open_words__a_dot_py=LINE + "a", open_words___vendor__lib_dot_py=LINE + "v",
    )  # fmt: skip
    make_package(
        tmp_path, "closed-words", "Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)",
        closed__c_dot_py=LINE + "c",
    )  # fmt: skip
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_package_is_one_group_with_its_licence_and_without_vendored_files(packages: Path) -> None:
    (packages / "open_words" / "b.py").write_bytes(b"\xe9" + LINE.encode())
    corpus = collect(package_sources(["open_words"]))
    assert names(corpus) == ["package:open-words:open_words/a.py"]
    assert {document.group for document in corpus.documents} == {"package:open-words"}
    record = corpus.records[0]
    assert (record.version, record.licence.name, record.licence.evidence) == ("1.0", "MIT", "License-Expression")
    assert record.left_out == {"not UTF-8": 1, "vendored": 1}


def test_a_named_package_under_the_gpl_is_refused(packages: Path) -> None:
    with pytest.raises(UserError, match=r"package 'closed-words' has the licence 'GNU General Public License v3"):
        package_sources(["closed-words"])
    with pytest.raises(UserError, match="package 'no-such-words' of the corpus is not installed"):
        package_sources(["no-such-words"])


def test_of_all_packages_the_refused_ones_are_recorded_and_not_read(packages: Path) -> None:
    sources = [source for source in package_sources() if source.name.endswith("-words")]
    corpus = collect(sources)
    assert [(record.source, record.num_documents) for record in corpus.records] == [
        ("package:closed-words", 0),
        ("package:open-words", 2),
    ]
    assert corpus.records[0].left_out == {"licence of the source": 1}
    with pytest.raises(UserError, match="refused for their licence: package:closed-words"):
        collect(sources[:1])


def test_installed_packages_under_copyleft_are_refused_as_they_are() -> None:
    """Of the packages that tests run with, two are under the Mozilla licence."""
    accepted = {source.name: source.licence.is_accepted for source in package_sources()}
    assert accepted["package:numpy"]
    assert accepted["package:torch"]
    assert not accepted["package:tqdm"]
    assert not accepted["package:hypothesis"]


def test_the_standard_library_gives_text_without_tests() -> None:
    source = stdlib_source()
    paths = [path for path, _ in source.files]
    assert {"json/decoder.py", "textwrap.py"} <= set(paths)
    assert not [path for path in paths if path.startswith("test/") or "site-packages" in path or "/tests/" in path]
    assert dict(source.files)["json/decoder.py"] == "stdlib:json"
    assert dict(source.files)["textwrap.py"] == "stdlib:textwrap"


def made(groups: int) -> Corpus:
    return Corpus(
        documents=tuple(Document(f"{g}/{i}", f"g{g}", "x") for g in range(groups) for i in (0, 1)), records=()
    )


def test_a_split_keeps_groups_whole_and_misses_nothing() -> None:
    train, held_out = made(40).split(0.25)
    assert {d.group for d in train}.isdisjoint(d.group for d in held_out)
    assert sorted(train + held_out) == sorted(made(40).documents)
    assert 4 <= len(held_out) / 2 <= 16


def test_a_group_keeps_its_side_when_the_corpus_grows_or_the_share_rises() -> None:
    small, large = made(40).split(0.25), made(80).split(0.25)
    assert set(small[0]) <= set(large[0])
    assert set(small[1]) <= set(large[1])
    assert set(small[1]) <= set(made(40).split(0.5)[1])
    assert made(40).split(0.25, salt="x") != small


def test_named_groups_are_held_out() -> None:
    train, held_out = made(4).split(0.0, held_out_groups=["g2"])
    assert {d.group for d in held_out} == {"g2"}
    assert {d.group for d in train} == {"g0", "g1", "g3"}
    with pytest.raises(UserError, match="no group 'g9' to hold out"):
        made(4).split(0.0, held_out_groups=["g9"])


@pytest.mark.parametrize(("share", "side"), [(0.0, "held-out"), (1.0, "training")])
def test_a_split_with_an_empty_side_is_refused(share: float, side: str) -> None:
    with pytest.raises(UserError, match=f"leaves no {side} text"):
        made(4).split(share)


def test_the_fingerprint_is_of_names_and_texts() -> None:
    def fingerprint(*documents: tuple[str, str]) -> str:
        return Corpus(documents=tuple(Document(n, n, t) for n, t in documents), records=()).fingerprint

    prints = [
        fingerprint(("a", "bc")),
        fingerprint(("ab", "c")),
        fingerprint(("a", "b"), ("c", "d")),
        fingerprint(("a", "bd")),
    ]
    assert len(set(prints)) == 4
    assert fingerprint(("a", "bc")) == prints[0]
