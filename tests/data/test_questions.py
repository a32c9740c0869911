"""Questions from files: Search-R1's schema, its mistakes by row, mixing, benchmarks."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from cusearch_async.config import load_config
from cusearch_async.data.files import read_rows, write_questions
from cusearch_async.data.questions import SUITE, first_question, load_eval_questions, load_questions, load_run_questions
from cusearch_async.data.rows import tidy
from cusearch_async.errors import ConfigError
from cusearch_async.files import writing_output
from cusearch_async.types import Question

ROW = {
    "data_source": "nq",
    "question": " who wrote Dubliners ",
    "golden_answers": ["James Joyce", "Joyce"],
    "extra_info": {"split": "train", "index": 3},
}
DUBLINERS = Question(id="nq/train/3", text="who wrote Dubliners?", answers=("James Joyce", "Joyce"), category="nq")


@pytest.fixture
def write(tmp_path):
    def put(*rows, name="train.parquet"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            parquet.write_table(pa.Table.from_pylist(list(rows)), path)
        else:
            path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return put


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_a_row_becomes_a_question(write, name):
    assert load_questions([write(ROW, name=name)]) == [DUBLINERS]


def test_two_of_one_id_are_refused_because_they_would_be_one_group(write):
    with pytest.raises(ConfigError, match="two questions have the id 'nq/train/3'"):
        load_questions([write(ROW), write(ROW, name="again.parquet")])


def test_several_sources_are_one_dataset(write):
    other = ROW | {"data_source": "hotpotqa"}
    loaded = load_questions(["atlas", write(ROW, name="a.parquet"), write(other, name="b.jsonl")])
    assert [q.id for q in loaded[-2:]] == ["nq/train/3", "hotpotqa/train/3"]
    assert len(loaded) > 1000


TEMPLATE = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first. For example, "
    "<answer> Beijing </answer>. Question: {}\n"
)


@pytest.mark.parametrize("asked", ["who wrote Dubliners", TEMPLATE.format("who wrote Dubliners")])
@pytest.mark.parametrize("solution", [{"target": ["James Joyce"]}, ["James Joyce"], "James Joyce"])
@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_the_five_columns_of_search_r1s_readme_are_enough(write, name, asked, solution):
    """ "Use your own dataset": the prompt is the question, or what its script makes of it."""
    row = {
        "data_source": "nq",
        "prompt": [{"role": "user", "content": asked}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": solution},
        "extra_info": {"split": "train", "index": 3},
    }
    assert load_questions([write(row, name=name)]) == [replace(DUBLINERS, answers=("James Joyce",))]


def verl_row(**changes):
    """As VERL's preprocess_search_r1_dataset.py writes it."""
    question, truth = "who wrote Dubliners", {"target": ["James Joyce", "Joyce"]}
    arguments = {"ground_truth": truth, "question": question, "data_source": "searchR1_nq"}
    return {
        "data_source": "searchR1_nq",
        "prompt": [
            {"role": "system", "content": "You are a helpful and harmless assistant."},
            {"role": "user", "content": TEMPLATE.format("").strip() + question},
        ],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": truth, "style": "rule"},
        "extra_info": {
            "index": 3,
            "need_tools_kwargs": True,
            "question": question,
            "split": "train",
            "tools_kwargs": {"search": {"create_kwargs": arguments}},
        },
        "metadata": None,
    } | changes


def test_verls_parquet_is_read(write):
    """Its tool's arguments, which have the answers, are none of the metadata that a program is given."""
    wanted = replace(DUBLINERS, id="searchR1_nq/train/3", category="searchR1_nq")
    assert load_questions([write(verl_row())]) == [wanted]


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_what_else_extra_info_holds_is_metadata_for_a_reward(write, name):
    rubric = [{"criterion": "names a source", "points": 2}]
    extra = {"split": "train", "index": 3, "question": "q", "rubric": rubric, "judge": None, "context": "long", "n": 7}
    row = ROW | {"extra_info": extra, "metadata": {"n": 8}}
    (question,) = load_questions([write(row, name=name)])
    assert question == replace(DUBLINERS, metadata={"rubric": rubric, "n": 8})


def test_of_a_chat_the_last_user_message_asks(write):
    chat = [
        {"role": "user", "content": "Question: where are you?"},
        {"role": "assistant", "content": "Question: am I?"},
        {"role": "user", "content": "No Question: who wrote it"},
        {"role": "assistant", "content": "Well"},
    ]
    row = verl_row(prompt=chat, extra_info={"index": 3, "split": "train"})
    assert load_questions([write(row)])[0].text == "who wrote it?"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([{"role": "system", "content": "who?"}], "row 0: 'question' must be non-blank text, got None"),
        ([], "row 0: 'question' must be non-blank text, got None"),
        ([{"role": "user", "content": " "}], "row 0: 'question' must be non-blank text, got ' '"),
        (
            [{"role": "user", "content": "Write <think> </think> first. who?"}],
            "row 0: the last user message of 'prompt' has instructions, but no 'Question:' before its question; "
            "add a column 'question'. The message is 'Write <think> </think> first. who",
        ),
    ],
)
def test_a_prompt_that_asks_nothing_plainly_is_named(write, prompt, said):
    row = verl_row(prompt=prompt, extra_info={"index": 3, "split": "train"})
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_questions([write(row)])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"question": "who \\ud83d"}, r"line 2: 'question' contains an unpaired surrogate, \\ud83d; fix the text"),
        ({"golden_answers": ["Joyce", "\\udE00"]}, r"line 2: 'golden_answers' contains an unpaired surrogate, \\ude00"),
        ({"data_source": "a\\ud83d"}, r"line 2: 'id' contains an unpaired surrogate, \\ud83d"),
        (
            {"evidence_docs": [{"text": "a"}, {"text": "\\ud800"}]},
            "line 2: 'evidence_docs' contains an unpaired surrogate",
        ),
        ({"metadata": {"note": "half \\ud800"}}, "line 2: 'metadata' contains an unpaired surrogate"),
    ],
)
def test_an_unpaired_surrogate_is_refused_because_no_tokenizer_takes_it(write, change, said):
    line = json.dumps(ROW | change).replace("\\\\u", "\\u")
    with pytest.raises(ConfigError, match=said):
        load_questions([write(ROW, line, name="train.jsonl")])


def test_whole_characters_and_control_characters_are_left_alone(write):
    row = ROW | {"question": "a\x00b\x07 \U0001f600 <|im_start|>?"}
    assert load_questions([write(row, name="train.jsonl")])[0].text == row["question"]


@pytest.mark.parametrize("place", [0, 2])
def test_text_of_another_encoding_in_a_parquet_file_is_named_by_its_row(tmp_path, place):
    questions = pa.array([b"caf\xe9" if i == place else b"who" for i in range(4)]).view(pa.string())
    path = tmp_path / "latin.parquet"
    parquet.write_table(pa.table({"question": questions, "golden_answers": [["a"]] * 4}), path)
    with pytest.raises(ConfigError, match=rf"row {place}: is not UTF-8"):
        load_questions([str(path)])


def test_questions_whose_gold_answers_are_blank_once_scored_are_counted_and_named(write, caplog):
    blank = [
        ROW | {"golden_answers": golds, "extra_info": None, "id": i} for i, golds in enumerate((["The The"], ["!"]))
    ]
    other = ROW | {"golden_answers": ["The The", "a band"]}
    assert len(load_questions([write(*blank, other, name="train.jsonl")])) == 3
    (said,) = caplog.messages
    assert said.startswith("2 of 3 questions can never be scored correct")
    assert said.endswith("(nq/0, nq/1)")


def test_rows_without_a_place_are_named_after_their_file_and_line(write):
    path = write(*({"question": f"q{i}", "golden_answers": ["a"]} for i in range(2)), name="mine.jsonl")
    assert [q.id for q in load_questions([path])] == ["mine/0", "mine/1"]


def test_what_is_written_is_search_r1s_schema_and_is_read_back(tmp_path, write):
    before = load_questions([write(ROW, ROW | {"data_source": "hotpotqa"})])
    path = tmp_path / "out" / "test.parquet"
    with writing_output(path, "--output"):
        write_questions(before, path)
    (first, _) = parquet.read_table(path).to_pylist()
    assert first["prompt"][0]["role"] == "user"
    assert "who wrote Dubliners?" in first["prompt"][0]["content"]
    assert first["reward_model"] == {"style": "rule", "ground_truth": {"target": ["James Joyce", "Joyce"]}}
    assert first["extra_info"] == {"split": "train", "index": "3"}
    assert load_questions([str(path)]) == before, "of the same ids: the same groups"


@pytest.mark.parametrize(
    "evidence",
    [
        [None, None],
        [(), ()],
        [None, ()],
        [(), ("A botanist.", '"Pinsk"\nHe left\tPinsk – 1911, 平壤.\n')],
        [("one",), None, (), ("two", "three")],
    ],
)
def test_evidence_is_written_and_read_back(tmp_path, evidence):
    before = [
        Question(id=f"s/test/{i}", text=f"q{i}?", answers=("a",), category="s", evidence=texts)
        for i, texts in enumerate(evidence)
    ]
    path = tmp_path / "mine.parquet"
    write_questions(before, path)
    assert load_questions([str(path)]) == before
    is_known = any(texts is not None for texts in evidence)
    assert ("evidence_docs" in parquet.read_schema(path).names) == is_known, "else the schema is Search-R1's own"


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_metadata_and_aliases_are_written_and_read_back(tmp_path, ending):
    known = [{"hops": 2, "type": "bridge", "steps": [{"q": "whose “bell”?"}, 3]}, {}, {"level": ["a", None]}]
    before = [
        Question(id=f"s/test/{i}", text=f"q{i}?", answers=("a", "b"), category="s", metadata=metadata)
        for i, metadata in enumerate(known)
    ]
    write_questions(before, tmp_path / f"mine{ending}")
    assert load_questions([str(tmp_path / f"mine{ending}")]) == before


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_a_missing_index_is_the_id_or_the_row(write, name):
    rows = [{**ROW, "id": f"x{i}", "extra_info": {"split": "train", "index": None}} for i in range(2)]
    assert [q.id for q in load_questions([write(*rows, name=name)])] == ["nq/train/x0", "nq/train/x1"]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        *[("a", "a?"), (" a? ", "a?"), ("a ? ", "a ?"), ("か\uff1f", "か\uff1f"), ("ك؟", "ك؟")],
        *[
            ("a 3", "a 3?"),
            ("a (b)", "a (b)?"),
            ('a "b."', 'a "b."?'),
            ("who’s ‘a’", "who’s ‘a’?"),
            ("a in C++", "a in C++?"),
        ],
        *[
            ("Write of ä.", "Write of ä."),
            ("Explain!", "Explain!"),
            ("the sum:", "the sum:"),
            ("書け。", "書け。"),
            ("a…", "a…"),
        ],
    ],
)
def test_questions_end_in_a_question_mark_as_in_search_r1_unless_in_other_punctuation(text, wanted):
    assert tidy(text) == wanted


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: is not JSON"),
        ("[1]", "line 2: must be a JSON object, got list"),
        (json.dumps(ROW | {"golden_answers": True}), "line 2: 'golden_answers' must be .*, got True"),
        (json.dumps(ROW | {"golden_answers": [1, False]}), r"line 2: 'golden_answers' must be .*, got \[1, False\]"),
        (json.dumps(ROW | {"golden_answers": float("nan")}), "line 2: 'golden_answers' must be .*, got nan"),
        (json.dumps(ROW | {"golden_answers": float("inf")}), "line 2: 'golden_answers' must be .*, got inf"),
        (
            json.dumps(ROW | {"golden_answers": []}),
            r"line 2: 'golden_answers' must be a list of non-blank texts, got \[\]",
        ),
        (json.dumps(ROW | {"golden_answers": [" "]}), "line 2: 'golden_answers' must be"),
        (json.dumps(ROW | {"golden_answers": None}), "line 2: 'golden_answers' must be"),
        (json.dumps(ROW | {"question": " "}), "line 2: 'question' must be non-blank text, got ' '"),
        (json.dumps(ROW | {"question": None}), "line 2: 'question' must be non-blank text, got None"),
        (json.dumps(ROW | {"data_source": 3}), "line 2: 'data_source' must be text, got 3"),
        ('{"id": ' + "1" * 5000 + "}", "line 2: is not JSON"),
        ("[" * 100_000, "line 2: is not JSON"),
        (json.dumps(ROW | {"extra_info": {"index": [3]}}), r"line 2: 'index' .* must be text or a number, got \[3\]"),
        (json.dumps(ROW | {"extra_info": {"index": 3, "split": ["a"]}}), "line 2: 'split' .* must be text"),
        (json.dumps(ROW | {"extra_info": "x"}), "line 2: 'extra_info' must hold split and index"),
    ],
)
def test_a_wrong_line_of_a_json_file_is_named(write, line, said):
    with pytest.raises(ConfigError, match=said):
        load_questions([write(ROW, line, name="train.jsonl")])


@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere.parquet", "there is no such file"), ("hf:only-an-owner", "must look like hf:OWNER/NAME/FILE.parquet")],
)
def test_a_source_that_is_not_there_is_named(source, said):
    with pytest.raises(ConfigError, match=rf"data\.source.*{said}"):
        load_questions([source])


def test_a_file_that_is_no_parquet_or_empty_is_named(tmp_path):
    for text, said in (("not parquet", "cannot read"), ("", "cannot read")):
        (tmp_path / "x.parquet").write_text(text)
        with pytest.raises(ConfigError, match=said):
            load_questions([str(tmp_path / "x.parquet")])
    (tmp_path / "x.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="holds no questions"):
        load_questions([str(tmp_path / "x.jsonl")])


def test_a_hub_file_is_downloaded_once_by_its_library(monkeypatch, write):
    asked = []

    def download(repo, file, repo_type):
        asked.append((repo, file, repo_type))
        return write(ROW)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert load_questions(["hf:owner/name/nq/train.parquet"])[0].id == "nq/train/3"
    assert asked == [("owner/name", "nq/train.parquet", "dataset")]


# Held-out questions.


@pytest.fixture
def suite(write, tmp_path, atlas_config):
    for name in ("nq", "bamboogle"):
        file, _ = SUITE[name]
        rows = ({"id": f"{name}_{i}", "question": f"{name} {i}", "golden_answers": ["a"]} for i in range(50))
        write(*rows, name=f"suite/{file}")

    def config(*overrides):
        return load_config(atlas_config, ["--eval.folder", str(tmp_path / "suite"), *overrides])

    return config


@pytest.mark.parametrize("key", ["data.source", "environment.search.source"])
@pytest.mark.parametrize("read", [load_run_questions, lambda config: first_question(config, "search")])
def test_the_setting_that_names_a_missing_file_is_told(atlas_config, key, read):
    """It was data.source for all, which an environment's own comes before."""
    config = load_config(atlas_config, [f"--{key}", "nothere.jsonl"])
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: cannot read nothere.jsonl"):
        read(config)


def test_benchmarks_are_taken_by_name(suite):
    found = load_eval_questions(suite("--eval.suite", '["bamboogle", "nq"]'))
    assert [q.category for q in found] == ["bamboogle"] * 50 + ["nq"] * 50
    assert found[50].id == "nq/nq_0"
    assert found[50].text == "nq 0?"


def test_a_suite_has_no_source_with_the_name_of_all(suite, write):
    """Its scores would be hidden behind those of all together."""
    files = [write(ROW | {"data_source": name, "id": 1}, name=f"{name}.jsonl") for name in ("all", "b")]
    with pytest.raises(ConfigError, match="questions of the source 'all', the name of all sources together; rename it"):
        load_eval_questions(suite("--eval.suite", json.dumps(files)))
    assert len(load_eval_questions(suite("--eval.suite", json.dumps(files[:1])))) == 1


@pytest.mark.parametrize("name", ["step", "epoch", "seconds", "each"])
def test_a_suite_has_no_source_with_the_name_of_a_column_of_its_scores(suite, write, name):
    """It took the column's place, and the row was skipped as damaged, so that no version ever was scored."""
    file = write(ROW | {"data_source": name, "id": 1}, name="a.jsonl")
    with pytest.raises(ConfigError, match=f"questions of the source '{name}', a column of eval.jsonl; rename it"):
        load_eval_questions(suite("--eval.suite", json.dumps([file])))


def test_files_of_a_suite_have_different_ids(suite, write):
    files = [write(ROW | {"data_source": "mine", "id": 1, "question": name}, name=f"{name}.jsonl") for name in "ab"]
    with pytest.raises(ConfigError, match="two questions have the id"):
        load_eval_questions(suite("--eval.suite", json.dumps(files)))


def test_a_suite_of_files_is_scored_by_their_names(suite, write):
    row = {"id": "test_0", "question": "q", "golden_answers": ["a"]}
    files = [write(row, name=f"{name}/test.jsonl") for name in ("one", "two")]
    found = load_eval_questions(suite("--eval.suite", json.dumps([*files, "nq"])))
    assert [(q.id, q.category) for q in found[:3]] == [
        ("one/test/test_0", "one"),
        ("two/test/test_0", "two"),
        ("nq/nq_0", "nq"),
    ]


def test_a_limit_takes_the_same_questions_in_their_order_whatever_the_seed(suite):
    """Runs of several seeds are compared question by question."""
    seeds = ((), ("--run.seed", "1"))
    some = [load_eval_questions(suite("--eval.suite", "nq", "--eval.limit", "7", *seed)) for seed in seeds]
    assert some[0] == some[1]
    numbers = [int(q.id.rpartition("_")[2]) for q in some[0]]
    assert numbers == sorted(numbers)
    assert len(numbers) == 7
    assert numbers != list(range(7))


def test_without_a_suite_atlas_has_questions_of_its_own_and_others_are_asked_for_one(suite, write):
    assert len(load_eval_questions(suite("--eval.questions_per_category", "2"))) == 10
    with pytest.raises(ConfigError, match=r"eval\.suite must name benchmarks \(nq, triviaqa"):
        load_eval_questions(suite("--data.source", write(ROW)))


def test_more_questions_of_atlas_than_there_are_is_refused_with_the_setting(suite):
    with pytest.raises(ConfigError, match=r"eval\.questions_per_category must be <= 500 .*, got 9999"):
        load_eval_questions(suite("--eval.questions_per_category", "9999"))


def test_the_seven_benchmarks_have_their_published_sizes():
    assert list(SUITE) == ["nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle"]
    assert sum(count for _, count in SUITE.values()) == 51_713


def test_rows_are_read_lazily(write):
    first = next(iter(read_rows(Path(write(*[ROW] * 10)), "data.source")))
    assert first.where.endswith("train.parquet, row 0")
