"""Question files of other formats than parquet and JSON lines, and rows as the benchmarks' authors publish them."""

from __future__ import annotations

import gzip
import json

import pandas as pd
import pytest

from cusearch_async.data.questions import load_questions
from cusearch_async.data.rows import origin_of
from cusearch_async.errors import ConfigError

FIRST = {"id": "7", "question": "Where is Orvela?", "golden_answers": ["Tamsk", "Tamsk, Upper Reach"]}
SECOND = {"id": "8", "question": 'Who wrote "The Grey, Long Sea"?', "golden_answers": ["NA"]}
ROWS = [FIRST | {"data_source": "own"}, SECOND | {"data_source": "own"}]
WANTED = [("own/7", ROWS[0]["question"], ("Tamsk", "Tamsk, Upper Reach")), ("own/8", ROWS[1]["question"], ("NA",))]
BOM = b"\xef\xbb\xbf"


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def csv(**how):
    return pd.DataFrame(ROWS).to_csv(index=False, **how)


FILES = {
    "a.jsonl": lines(ROWS),
    "lines.json": lines(ROWS),
    "a.ndjson": lines(ROWS),
    "array.json": "\n\n " + json.dumps(ROWS, indent=1),
    "array.jsonl": json.dumps(ROWS),
    "spread.jsonl": "\n".join(json.dumps(row, indent=2) for row in ROWS),
    "one_line.json": json.dumps({"version": "1.1", "data": ROWS}),
    "object.json": json.dumps({"version": "1.1", "data": ROWS}, indent=1),
    "a.csv": csv(),
    "a.tsv": csv(sep="\t"),
    "semicolons.csv": csv(sep=";"),
    "crlf.csv": csv(lineterminator="\r\n"),
    "camel.json": json.dumps([{**row, "goldenAnswers": row["golden_answers"], "golden_answers": None} for row in ROWS]),
    "upper.csv": csv(header=["ID", "Question", "Golden Answers", "Data-Source"]),
    "numpy.csv": csv().replace("', '", "' '"),
    "A.JSONL": lines({name.upper(): value for name, value in row.items()} for row in ROWS),
}


@pytest.mark.parametrize("bom", [b"", BOM], ids=["", "BOM"])
@pytest.mark.parametrize("packed", [False, True], ids=["", "gz"])
@pytest.mark.parametrize("name", FILES)
def test_every_format_gives_the_same_questions(tmp_path, name, packed, bom):
    content = bom + FILES[name].encode()
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(content, mtime=0) if packed else content)
    assert [(q.id, q.text, q.answers) for q in load_questions([str(path)])] == WANTED


def test_a_parquet_file_with_columns_in_upper_case_is_read(tmp_path):
    pd.DataFrame(ROWS).rename(columns=str.upper).to_parquet(tmp_path / "a.parquet")
    assert [(q.id, q.text, q.answers) for q in load_questions([str(tmp_path / "a.parquet")])] == WANTED


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"question": "q"},\n{"quest', r"a\.json: is neither a JSON array nor .* Unterminated string"),
        ("a.jsonl", b'["q", "a"]\n["q", "a"]', r"a\.jsonl, item 0: must be a JSON object, got list"),
        ("a.jsonl", b'{\n "question": "q"\n}\n{\n "q', r"a\.jsonl: is neither a JSON array nor one obj"),
        ("a.json", b'["q", "a"]', r"a\.json, item 0: must be a JSON object, got str"),
        (
            "a.json",
            b'{"x": {}, "y": {}}',
            r"item 0: 'question' must be .*, got None; the row has x, y; it needs 'question', ",
        ),
        (
            "a.jsonl",
            b'{"Asked": "q", "answer": "a"}',
            r"the row has Asked, answer; it needs 'question', .* or 'answer' ",
        ),
        ("a.jsonl", b'{"question": "q", "solution": "a"}', r"the row has question, solution; it needs .* or 'answer' "),
        ("a.csv", b"asked,solution\nq,a\n", r"has the columns asked, solution; it needs 'question'"),
        ("a.csv", b"question,answer\nq,a,b\n", r"line 2: has more than the 2 cells of the header"),
        ("a.csv", b"question,answer\nq\n", r"line 2: 'golden_answers' must be .*, got None"),
        ("a.csv", b'question,answer\n"q" r,a\n', r"line 2: is not CSV: ',' expected after '\"'"),
        ("a.csv", b'question,answer\n"q,a\nq,a\n', r"lines 2 to 3: is not CSV: unexpected end of data"),
        ("a.tsv", b'question\tanswer\n"q\ta\nr"\ta\n', r"lines 2 to 3: a quotation mark is open: all is one row"),
        ("a.csv", b"question,answer\ncaf\xe9,a\n", r"line 2: is not UTF-8"),
        ("a.csv", b"", r"has the columns none; it needs"),
        ("a.csv", b"question,answer,answer\nq,a,b\n", r"a\.csv: has two columns 'answer'; keep one of them"),
        ("a.csv", b'"question"s,answer\n', r"cannot read .*a\.csv: .,. expected after"),
        ("a.csv", "question,answer\n".encode("utf-16"), r"a\.csv is UTF-16; save it as UTF-8"),
        ("a.jsonl.gz", b"question", r"cannot read .*a\.jsonl\.gz: Not a gzipped file"),
        ("a.jsonl.gz", gzip.compress(b'{"a"' * 9, mtime=0)[:20], r"cannot read .*: Compressed file ended before"),
        ("a.parquet.gz", b"", r"a\.parquet\.gz is packed, and parquet is compressed already; unpack it with gzip -d"),
        ("a.toml", b"", r"a\.toml is a \.toml file; give one of \.parquet, \.jsonl, \.json"),
        ("a", b"", r"a has no file extension; give one of \.parquet, \.jsonl, \.json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_in_one_line(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=said) as raised:
        load_questions([str(tmp_path / name)])
    assert "\n" not in str(raised.value)


def test_a_folder_is_named_as_one(tmp_path):
    with pytest.raises(ConfigError, match=r"is a folder; give a file in it"):
        load_questions([str(tmp_path)])


# Names.


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("flash/nq/test.jsonl", ("nq", "test")),
        ("nq/train.jsonl.gz", ("nq", "train")),
        ("nq/data/train-00000-of-00002.parquet", ("nq", "train-00000-of-00002")),
        ("hf:owner/nq_open/Validation.json", ("nq_open", "Validation")),
        ("data/test.jsonl", ("test", "")),
        ("test.csv", ("test", "")),
        ("../test.csv", ("test", "")),
        ("nq/mine.jsonl", ("mine", "")),
    ],
)
def test_files_that_are_named_after_a_split_are_known_by_their_folder(source, wanted):
    origin = origin_of(source)
    assert (origin.source, origin.split) == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["nq/test.jsonl", "popqa/test.jsonl"], ["nq/test/test_0", "popqa/test/test_0"]),
        (["nq/test.jsonl", "nq/train.jsonl"], ["nq/test/test_0", "nq/train/test_0"]),
        (["a/mine.jsonl", "b/mine.jsonl"], ["a/mine/test_0", "b/mine/test_0"]),
        (["a/nq/test.jsonl", "b/nq/test.jsonl"], ["a/nq/test/test_0", "b/nq/test/test_0"]),
    ],
)
def test_equal_ids_in_files_of_several_folders_are_several_questions(tmp_path, files, wanted):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(lines([{"id": "test_0", "question": "q", "golden_answers": ["a"]}]))
    found = load_questions([str(tmp_path / file) for file in files])
    assert [question.id for question in found] == wanted


def test_a_packed_file_is_known_by_its_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(lines(ROWS).encode(), mtime=0))
    assert [q.id for q in load_questions([str(tmp_path / "a.jsonl")])] == ["own/7", "own/8"]


@pytest.mark.parametrize("name", ["id", "_id", "qid", "idx", "query_id", "question_id"])
def test_ids_of_the_benchmarks_are_the_questions_ids_whatever_their_order(tmp_path, name):
    rows = [{name: f"5ab{i}", "question": f"q{i}", "answer": "a"} for i in range(3)]
    for order in (rows, rows[::-1]):
        (tmp_path / "mine.jsonl").write_text(lines(order))
        assert {q.id: q.text for q in load_questions([str(tmp_path / "mine.jsonl")])} == {
            f"mine/5ab{i}": f"q{i}?" for i in range(3)
        }


# Rows as the benchmarks' authors publish them, of invented words.

MUSIQUE = {
    "id": "2hop__11_22",
    "paragraphs": [
        {"idx": 0, "title": "Orvela", "paragraph_text": "Orvela is a mill.", "is_supporting": False},
        {"idx": 1, "title": "Tamsk", "paragraph_text": "Tamsk has a bell.", "is_supporting": True},
        {"idx": 2, "title": "Ilmo", "paragraph_text": "Ilmo cast the bell.", "is_supporting": True},
    ],
    "question": "Who cast the bell of Tamsk?",
    "question_decomposition": [{"id": 11, "question": "Tamsk >> bell"}, {"id": 22, "question": "Who cast #1?"}],
    "answer": "Ilmo Ress",
    "answer_aliases": ["Ress"],
    "answerable": True,
}
HOTPOT = {
    "_id": "5ab3",
    "question": "Which is older, Orvela or Tamsk?",
    "answer": "Tamsk",
    "type": "comparison",
    "level": "hard",
    "supporting_facts": [["Orvela", 0], ["Tamsk", 1], ["Orvela", 1]],
    "context": [["Ilmo", ["No."]], ["Orvela", ["Orvela is new.", " It is a mill."]], ["Tamsk", ["Tamsk is old."]]],
}
ON_THE_HUB = HOTPOT | {
    "supporting_facts": {"title": ["Orvela", "Tamsk"], "sent_id": [0, 1]},
    "context": {"title": ["Orvela", "Tamsk"], "sentences": [["Orvela is new.", " It is a mill."], ["Tamsk is old."]]},
}
EVIDENCE = ('"Orvela"\nOrvela is new. It is a mill.', '"Tamsk"\nTamsk is old.')


@pytest.fixture
def read(tmp_path):
    def load(row, name="mine.json"):
        path = tmp_path / name
        if name.endswith(".parquet"):
            pd.DataFrame([row]).to_parquet(path)
        elif name.endswith(".csv"):
            pd.DataFrame([row]).to_csv(path, index=False)
        else:
            path.write_text(json.dumps([row]))
        (question,) = load_questions([str(path)])
        return question

    return load


@pytest.mark.parametrize("name", ["mine.json", "mine.parquet", "mine.csv"])
def test_musiques_own_rows_bring_aliases_evidence_and_hops(read, name):
    question = read(MUSIQUE, name)
    assert question.id == "mine/2hop__11_22"
    assert question.answers == ("Ilmo Ress", "Ress")
    assert question.evidence == ('"Tamsk"\nTamsk has a bell.', '"Ilmo"\nIlmo cast the bell.')
    assert question.hops == 2


AS_PUBLISHED = [(row, f"mine.{kind}") for row in (HOTPOT, ON_THE_HUB) for kind in ("json", "csv")]


@pytest.mark.parametrize(("row", "name"), [*AS_PUBLISHED, (ON_THE_HUB, "mine.parquet")])
def test_hotpotqas_rows_bring_evidence_hops_type_and_level(read, row, name):
    question = read(row, name)
    assert question.id == "mine/5ab3"
    assert question.evidence == EVIDENCE
    assert question.metadata == {"type": "comparison", "level": "hard", "hops": 2}


@pytest.mark.parametrize(
    ("change", "hops"),
    [
        ({"type": "bridge_comparison"}, 4),
        ({"metadata": {"hops": 3}}, 3),
        ({"metadata": '{"hops": "3"}'}, 3),
        ({"metadata": {"type": "3hop1"}}, 3),
        ({"n_hops": 5.0}, 5),
        ({"extra_info": {"hops": 3}}, 3),
        ({"_id": "musique_4hop1__1_2_3"}, 4),
        ({"type": "odd"}, None),
        ({"metadata": {"hops": None}}, 2),
    ],
)
def test_hops_are_read_wherever_a_row_says_them(read, change, hops):
    assert read(HOTPOT | change).hops == hops


@pytest.mark.parametrize(
    "change",
    [
        {"context": "a text"},
        {"context": [["Orvela", ["Orvela is new."]]]},
        {"supporting_facts": None},
        {"supporting_facts": {}},
        {"context": None, "paragraphs": [{"title": "Tamsk", "paragraph_text": "x", "is_supporting": False}]},
    ],
)
def test_evidence_of_which_a_text_is_missing_is_not_known(read, change):
    assert read(HOTPOT | change).evidence is None


@pytest.mark.parametrize("holder", ["metadata", "extra_info"])
def test_supporting_facts_within_another_column_are_read(read, holder):
    question = read({"id": "dev_0", "question": "q", "golden_answers": ["a"], holder: HOTPOT})
    assert question.evidence == EVIDENCE
    assert "context" not in question.metadata, "every process of a run would hold all of it"


def test_paragraphs_that_are_no_lists_of_sentences_are_evidence(read):
    context = [["Orvela", "Orvela is new. It is a mill."], ["Tamsk", "Tamsk is old."]]
    assert read(HOTPOT | {"context": context}).evidence == EVIDENCE


BROWSE = {
    "query_id": "771",
    "query": "Which town did the botanist leave in 1911",
    "answer": "Pinsk",
    "gold_docs": [{"docid": "8", "text": "He left Pinsk.", "url": "u"}],
    "evidence_docs": [{"docid": "5", "text": "A botanist.", "url": "u"}, {"docid": "8", "text": "He left Pinsk."}],
}


@pytest.mark.parametrize("name", ["browse.json", "browse.parquet"])
def test_rows_of_browsecomp_plus_bring_their_evidence(read, name):
    question = read(BROWSE, name)
    assert (question.id, question.category) == ("browse/771", "browse")
    assert question.text == "Which town did the botanist leave in 1911?"
    assert question.answers == ("Pinsk",)
    assert question.evidence == ("A botanist.", "He left Pinsk.")


@pytest.mark.parametrize("documents", ["text", [{"docid": "5"}], [{"text": " "}], [None], 7])
def test_evidence_that_is_no_list_of_texts_is_named(read, documents):
    with pytest.raises(ConfigError, match=r"item 0: 'evidence_docs' must be a list of \{'text'"):
        read(BROWSE | {"evidence_docs": documents})
