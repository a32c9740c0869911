"""A corpus in a file, and the BM25 index that is made of it."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cusearch_async.config import Bm25Config, RetrieverConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval import bm25, indexing
from cusearch_async.retrieval.bm25 import Bm25Index
from cusearch_async.retrieval.corpus import Corpus, read_start

ROWS = [
    {"id": "0", "contents": '"Peru"\nThe capital of Peru is Lima.'},
    {"id": 1, "contents": '"Łódź"\nThe country of Łódź is Poland.', "more": [1, 2]},
    {"id": "2", "contents": "no title"},
]


@pytest.fixture
def write(tmp_path):
    def put(*lines, name="corpus.jsonl"):
        path = tmp_path / name
        path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines))
        return path

    return put


def lines(rows):
    return [json.dumps(row).encode() + b"\n" for row in rows]


def test_passages_are_read_where_they_lie(write):
    corpus = Corpus(write(*lines(ROWS[:2]), b"\n  \n", json.dumps(ROWS[2]).encode()))
    assert list(corpus) == [{"id": str(row["id"]), "contents": row["contents"]} for row in ROWS]
    assert corpus[-1]["id"] == "2"
    assert [p["id"] for p in corpus[1:]] == ["1", "2"]
    with pytest.raises(IndexError):
        corpus[3]


def test_the_fingerprint_tells_corpora_apart(write):
    one = Corpus(write(*lines(ROWS), name="a")).fingerprint
    assert one == Corpus(write(*lines(ROWS), name="b")).fingerprint
    assert one != Corpus(write(*lines(ROWS[:2]), name="c")).fingerprint
    assert one != Corpus(write(*lines([ROWS[0], ROWS[1], {"id": "2", "contents": "no tITle"}]), name="d")).fingerprint


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "gz"])
@pytest.mark.parametrize(
    "content", [b"".join(lines(ROWS)), json.dumps(ROWS, indent=1).encode()], ids=["lines", "array"]
)
def test_a_corpus_may_be_packed_or_an_array(tmp_path, content, packed, bom):
    path = tmp_path / ("corpus.json" + ".gz" * packed)
    path.write_bytes(gzip.compress(bom + content) if packed else bom + content)
    corpus = Corpus(path)
    assert list(corpus) == [{"id": str(row["id"]), "contents": row["contents"]} for row in ROWS]
    again = Corpus.opened(path, lambda _: corpus.starts)
    assert list(again) == list(corpus)
    assert again.fingerprint == corpus.fingerprint


@pytest.mark.parametrize(
    "row",
    [
        {"idx": 7, "title": "Tamsk", "text": "Tamsk has a bell."},
        {"_id": "7", "title": "Tamsk", "text": "Tamsk has a bell.", "metadata": {}},
        {"docid": "7", "title": "Tamsk", "paragraph_text": "Tamsk has a bell."},
        {"id": None, "_id": "7", "title": "\nTamsk ", "text": "Tamsk has a bell."},
    ],
)
def test_a_title_and_a_text_are_a_passage(write, row):
    assert list(Corpus(write(*lines([row])))) == [{"id": "7", "contents": '"Tamsk"\nTamsk has a bell.'}]


PSGS = (
    b"id\ttext\ttitle\r\n"
    b'1\t"Tamsk (""the bell"") has a bell."\tTamsk\r\n\n\t\t\r\n'
    b'2\tOrvela is a mill, isn\'t it?\t"Orvela ""Mill"""\n'
    b"3\tNo title.\t"
)
"""As DPR's psgs_w100.tsv: cells with quotation marks are in such, which are doubled in them."""


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["", "BOM"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "gz"])
def test_a_table_of_dpr_is_a_corpus(tmp_path, packed, bom):
    path = tmp_path / ("psgs.tsv" + ".gz" * packed)
    path.write_bytes(gzip.compress(bom + PSGS) if packed else bom + PSGS)
    corpus = Corpus(path)
    assert list(corpus) == [
        {"id": "1", "contents": '"Tamsk"\nTamsk ("the bell") has a bell.'},
        {"id": "2", "contents": '"Orvela "Mill""\nOrvela is a mill, isn\'t it?'},
        {"id": "3", "contents": "No title."},
    ]
    read_start(path, 2)
    again = Corpus.opened(path, lambda _: corpus.starts)
    assert list(again) == list(corpus)


def test_a_long_passage_of_a_table_is_read(write):
    assert len(Corpus(write(b"ID\tcontents\n7\t" + b"a" * 200_000, name="c.tsv"))[0]["contents"]) == 200_000
    unquoted = Corpus(write(b'id\ttext\ttitle\n1\t"Heroes is a song\tBowie\n2\ta\rb\tc\n', name="plain.tsv"))
    assert [one["contents"] for one in unquoted] == ['"Bowie"\n"Heroes is a song', '"c"\na\rb']


@pytest.mark.parametrize("text", ['"Hello" and "bye"', '"Open', '"a" b "c"'])
def test_quotation_marks_that_are_no_csv_stay(write, text):
    (passage,) = Corpus(write(f"id\ttext\n1\t{text}\n".encode(), name="c.tsv"))
    assert passage["contents"] == text


@pytest.mark.parametrize("title", [float("nan"), None, "", " "])
def test_a_title_that_is_none_is_left_out(write, title):
    """pandas writes NaN."""
    row = {"id": "7", "title": title, "text": "Tamsk has a bell."}
    assert list(Corpus(write(*lines([row])))) == [{"id": "7", "contents": "Tamsk has a bell."}]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("c.json", b'[{"id": 1},\n', r"c\.json: is neither one JSON array nor an object a line: .*"),
        ("c.json", b"[]", r"c\.json is empty"),
        ("c.json", None, r"cannot read .*c\.json"),
        ("c.json.gz", b"[]", r"cannot read .*c\.json\.gz: Not a gzipped file"),
        ("c.jsonl", '{"id": 1}'.encode("utf-16"), r"line 1: is not JSON: .*; it seems to be UTF-16: save it as UTF-8"),
        ("c.tsv", b"0\ta text\n", r"c\.tsv, line 1: must be a header like id, text, title, got 0, a text"),
        ("c.tsv", b"id\ttext\n1\ta\tb\n", r"c\.tsv, line 2: has 3 cells, and the header 2"),
        ("c.tsv", b'id\ttext\ttitle\n1\t"a\n', r"c\.tsv, line 2: has 2 cells, and the header 3"),
        (
            "c.tsv",
            b"id\ttext\n1\t\n",
            r"c\.tsv, line 2: 'contents' must be non-blank text, got None; its fields are id",
        ),
        ("c.tsv", b"id\ttext\n\ta\n", r"c\.tsv, line 2: has no 'id'"),
        ("c.tsv", b"id\ttext\n1\t\xe9\n", r"c\.tsv, line 2: is not TSV: 'utf-8' codec"),
        ("c.tsv", b"id\ttext\n", r"c\.tsv holds no passages"),
        (
            "c.csv",
            b"id,text\n",
            r"c\.csv is a \.csv file; it needs lines of \{\"id\", \"contents\"\}, or a \.tsv with a header",
        ),
        ("c.parquet", b"PAR1", r"c\.parquet is a \.parquet file; it needs lines of"),
        ("c.jsonl", b'{"id": 1, "body": "x"}', r"'contents' must be non-blank text, got None; its fields are id, body"),
    ],
)
def test_a_corpus_that_cannot_be_read_is_named_in_one_line(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        Corpus(tmp_path / name)


def test_a_corpus_on_the_hub_is_asked_for_as_a_file():
    with pytest.raises(ConfigError, match=r"retriever\.corpus hf:o/n/c\.jsonl must be a file of .* `hf download`, and"):
        Corpus(Path("hf:o/n/c.jsonl"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: is not JSON"),
        (b"\xff\xfe", "line 2: is not JSON"),
        (b"[1]", "line 2: must be a JSON object, got list"),
        (b'{"id": "1"}', "line 2: 'contents' must be non-blank text, got None"),
        (b'{"id": "1", "contents": " \\n"}', "line 2: 'contents' must be non-blank text"),
        (b'{"contents": "x"}', "line 2: has no 'id'"),
        (b"[" * 100_000, "line 2: is not JSON"),
        (b'{"id": ' + b"1" * 5000 + b', "contents": "x"}', "line 2: is not JSON"),
        (
            b'{"id": "1", "contents": "a \\ude00 b"}',
            r"line 2: 'contents' contains an unpaired surrogate, \\ude00; fix the text",
        ),
    ],
)
def test_a_wrong_line_is_named(write, line, said):
    with pytest.raises(ConfigError, match=r"corpus\.jsonl, " + said):
        Corpus(write(*lines(ROWS[:1]), line))


def test_both_halves_of_a_character_and_control_characters_are_text(write):
    corpus = Corpus(write(b'{"id": "1", "contents": "\\ud83d\\ude00 \\u0000 <|im_end|>"}\n'))
    assert corpus[0]["contents"] == "\U0001f600 \x00 <|im_end|>"


@pytest.mark.parametrize("text", [b"", b"\n\n"])
def test_a_corpus_without_passages_is_named(write, text):
    with pytest.raises(ConfigError, match=r"retriever\.corpus"):
        Corpus(write(text))


def test_duplicate_ids_are_counted_in_a_warning_that_names_the_first(write, caplog):
    Corpus(write(*lines(ROWS), name="a"))
    assert caplog.text == ""
    again = [{"id": 1, "contents": "other"}, {"id": "x", "contents": "new"}, {"id": "0", "contents": "another"}]
    assert len(Corpus(write(*lines([*ROWS, *again])))) == 6
    assert "2 of 6 passages have a duplicate id, like '1'" in caplog.text


# The index of a corpus.

MANY = [{"id": str(i), "contents": f'"City {i}"\nThe number of city{i} is n{i % 7}.'} for i in range(200)]


@pytest.fixture
def settings(write, tmp_path):
    return RetrieverConfig(corpus=str(write(*lines(MANY))), index=tmp_path / "index")


def made(settings, on_progress=lambda done, total: None):
    indexing.build(Corpus(Path(settings.corpus)), settings.index, settings, on_progress)
    return indexing.load(Path(settings.corpus), settings.index, settings)


def interrupted(settings, monkeypatch, after=50):
    """A build that ends when `after` passages have been tokenised."""
    monkeypatch.setattr(bm25, "_CHUNK", 50)

    def stop(done, total):
        if done >= after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(settings, stop)


QUERIES = ["number of city7", "n3", "city150 number", "zebra", ""]


loads_an_index = pytest.mark.system
"""numba compiles for seconds when an index is opened."""


def found(index):
    """Scores, and what has the best of them; the order of equal scores is not compared."""
    results = index.search(QUERIES, 5)
    best = [{p["id"] for p, score in result if score > result[-1][1]} for result in results]
    return [[score for _, score in result] for result in results], best


@loads_an_index
def test_an_index_in_a_folder_finds_what_one_in_memory_finds(settings):
    index = made(settings)
    assert found(index) == found(Bm25Index.in_memory(MANY))
    assert isinstance(index._index.scores["data"], np.memmap)


@loads_an_index
def test_an_interrupted_index_goes_on_where_it_stopped(settings, monkeypatch):
    interrupted(settings, monkeypatch, after=100)
    with pytest.raises(ConfigError, match="no finished index; build it with `cusearch index"):
        indexing.load(Path(settings.corpus), settings.index, settings)
    tokenized = []
    numbered = bm25._numbered
    monkeypatch.setattr(bm25, "_numbered", lambda texts, *how: tokenized.append(len(texts)) or numbered(texts, *how))
    index = made(settings)
    assert tokenized == [50, 50], "only those that were missing"
    assert found(index) == found(Bm25Index.in_memory(MANY))


@loads_an_index
def test_nothing_of_others_is_deleted_when_the_index_starts_over(write, tmp_path, monkeypatch):
    """The index may be in the folder of the corpus."""
    settings = RetrieverConfig(corpus=str(write(*lines(MANY))), index=tmp_path)
    interrupted(settings, monkeypatch)
    write(*lines(MANY[::-1]))
    assert found(made(settings)) == found(Bm25Index.in_memory(MANY[::-1])), "no part of another corpus is used"
    made(settings)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept[:3] == ["bm25", "corpus.jsonl", "manifest.json"]
    assert len(kept) == 4, "and where the passages of this corpus begin"


@pytest.mark.parametrize("name", ["chunks", "bm25", "manifest.json", "index.faiss"])
def test_a_folder_with_files_of_others_gets_no_index(settings, name):
    settings.index.mkdir()
    (settings.index / name).mkdir() if "." not in name else (settings.index / name).write_text("mine")
    with pytest.raises(
        ConfigError, match=rf"holds {name}, which `cusearch index` has not made; choose an empty folder"
    ):
        made(settings)
    assert [path.name for path in settings.index.iterdir()] == [name]


@loads_an_index
def test_an_index_serves_while_another_is_begun(settings, monkeypatch, tmp_path):
    before = found(made(settings))
    other = settings.model_copy(update={"corpus": str(tmp_path / "other.jsonl")})
    Path(other.corpus).write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in MANY[::-1]))
    interrupted(other, monkeypatch)
    assert found(indexing.load(Path(settings.corpus), settings.index, settings)) == before


@loads_an_index
def test_an_index_serves_until_that_of_another_corpus_is_made(settings, write, tmp_path, monkeypatch):
    """Before, its passages were cut where those of the other one begin, as soon as the other was begun."""
    made(settings)
    before = found(indexing.load(Path(settings.corpus), settings.index, settings))
    other = tmp_path / "other.jsonl"
    other.write_text(
        "".join(json.dumps({"id": str(n), "contents": "longer " * (n + 1)}) + "\n" for n in range(len(MANY)))
    )

    def fails(*_):
        raise ConfigError("the encoder cannot be loaded")

    with monkeypatch.context() as failing:
        failing.setattr(bm25, "build", fails)
        with pytest.raises(ConfigError, match="the encoder cannot be loaded"):
            made(settings.model_copy(update={"corpus": str(other)}))
    assert found(indexing.load(Path(settings.corpus), settings.index, settings)) == before


@loads_an_index
def test_an_index_of_another_corpus_is_named(settings, write):
    made(settings)
    write(*lines([*MANY[:-1], {"id": "x", "contents": "another one altogether"}]))
    with pytest.raises(ConfigError, match=r"was made from another corpus than retriever\.corpus"):
        indexing.load(Path(settings.corpus), settings.index, settings)


@loads_an_index
def test_an_index_that_lacks_bytes_is_damaged(settings):
    made(settings)
    vocabulary = settings.index / "bm25" / "vocab.index.json"
    vocabulary.write_bytes(vocabulary.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"is damaged \(bm25: it has \d+ bytes instead of \d+\); delete it and"):
        indexing.load(Path(settings.corpus), settings.index, settings)


@loads_an_index
@pytest.mark.parametrize("left", [0, 100])
def test_the_places_of_passages_that_cannot_be_read_are_damaged_and_of_no_other_corpus(settings, left):
    made(settings)
    (places,) = settings.index.glob("passages-*.npy")
    places.write_bytes(places.read_bytes()[:left])
    with pytest.raises(ConfigError, match=r"is damaged \(.*passages-"):
        indexing.load(Path(settings.corpus), settings.index, settings)


LETTERS = {"bm25": Bm25Config(tokenizer="tests.retrieval.tokenizers:letters")}


@loads_an_index
def test_an_index_names_its_tokenizer_and_is_refused_with_another(settings, monkeypatch):
    made(settings)
    manifest = json.loads((settings.index / "manifest.json").read_text())
    assert list(manifest) == ["format", "corpus", "passages", "tokenizer", "bytes"]
    assert manifest["tokenizer"].startswith("cusearch_async.retrieval.bm25:unicode_words (")
    with pytest.raises(
        ConfigError, match=r"tokenizer 'cus\S+bm25:unicode_words .*now 'tests\S+:letters .*build it again"
    ):
        indexing.load(Path(settings.corpus), settings.index, settings.model_copy(update=LETTERS))
    monkeypatch.setattr(bm25, "_RUN", re.compile(r"\w"))
    with pytest.raises(ConfigError, match="tokenizer 'cusearch_async"):
        indexing.load(Path(settings.corpus), settings.index, settings)


@loads_an_index
def test_an_own_tokenizer_makes_the_index(settings):
    index = made(settings.model_copy(update=LETTERS))
    assert index.search(["C"], 300)[0] == index.search(["c"], 300)[0]
    assert len(index.search(["y"], 300)[0]) == 200


@loads_an_index
def test_parts_by_another_tokenizer_are_not_continued(settings, monkeypatch, caplog):
    interrupted(settings.model_copy(update=LETTERS), monkeypatch)
    assert found(made(settings)) == found(Bm25Index.in_memory(MANY))
    assert "of another tokenizer; starting again" in caplog.text


def test_a_backend_without_index_is_named(settings):
    with pytest.raises(ConfigError, match="'serper' has no index; bm25 and dense have"):
        made(settings.model_copy(update={"backend": "serper"}))
