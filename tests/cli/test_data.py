"""`cusearch data`: what is wrong with a file, by row, and files in Search-R1's schema."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cusearch_async.data.checking import asked
from cusearch_async.data.questions import load_questions
from cusearch_async.errors import EpisodeFailed

GOOD = {"question": "who wrote Dubliners", "golden_answers": ["James Joyce"], "data_source": "nq", "id": "1"}


@pytest.fixture
def write(tmp_path):
    def put(*rows, name="train.jsonl"):
        path = tmp_path / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(path)

    return put


def test_a_good_file_is_summed_up(cusearch, write):
    status, output = cusearch("data", "check", write(GOOD, GOOD | {"id": "2", "data_source": "hotpotqa"}))
    assert status == 0
    assert "2 good rows, 1.0 answers each; 0 problems" in output
    assert "hotpotqa" in output
    assert output.count("gold answers: James Joyce") == 2, "of fewer than three questions all are shown once"
    assert "evidence known of 0; hops (questions): not known" in output
    assert "not read" not in output


def test_each_of_several_files_is_reported_with_what_is_known_and_what_is_not_read(cusearch, write):
    rows = [GOOD | {"id": str(i), "metadata": {"hops": 2 + i % 2}, "facts": []} for i in range(3)]
    rows[0]["evidence_docs"] = [{"text": "x"}]
    status, output = cusearch("data", "check", write("{", name="bad.jsonl"), write(*rows, name="good.jsonl"))
    assert status == 1
    assert "bad.jsonl" in output
    assert "3 good rows, " in output
    assert "evidence known of 1; hops (questions): 2 (2), 3 (1)" in output
    assert "columns that are not read: facts" in output
    assert "of the column prompt" not in output


def test_prompts_that_are_replaced_are_named(cusearch, write):
    """A system message in a file of VERL's schema was dropped, and nothing said so."""
    prompt = [{"role": "system", "content": "Cite paragraphs."}, {"role": "user", "content": "Who wrote Ulysses?"}]
    row = {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": {"target": ["James Joyce"]}}}
    status, output = cusearch("data", "check", write(row))
    assert status == 0
    told = "environment.search's prompt replaces its instructions and system message"
    assert f"of the column prompt only the question is read: {told}" in output


def test_every_wrong_row_is_named_and_the_good_ones_are_counted(cusearch, write):
    rows = [GOOD, "{", GOOD | {"golden_answers": []}, GOOD | {"question": "[bold]"}, GOOD | {"id": "3", "question": ""}]
    status, output = cusearch("data", "check", write(*rows))
    assert status == 1
    assert "2 good rows, 1.0 answers each; 4 problems" in output
    assert "line 2: is not JSON" in output
    assert "line 3: 'golden_answers' must be a list of non-blank texts, got []" in output
    assert "line 4: the id 'nq/1' was used before" in output
    assert "line 5: 'question' must be non-blank text, got ''" in output


def test_answers_that_scoring_makes_blank_are_warned_about_and_no_problem(cusearch, write):
    blank = [GOOD | {"id": f"b{i}", "golden_answers": ["The The"]} for i in range(5)]
    status, output = cusearch("data", "check", write(GOOD, *blank))
    assert status == 0
    output = " ".join(output.split())
    assert "6 good rows, 1.0 answers each; 0 problems" in output
    assert "5 can never be scored correct: their gold answers are empty after normalisation" in output
    assert "(line 2: 'The The'; line 3: 'The The'; line 4: 'The The'; …)" in output


def test_questions_without_gold_answers_are_taken_with_the_config_of_a_run_that_needs_none(
    cusearch, write, atlas_config
):
    path = write({"question": "Write of Pinsk."}, {"question": "Write of Brest."})
    status, output = cusearch("data", "check", path)
    assert status == 1
    assert "0 good rows, 0.0 answers each; 2 problems" in output
    own = ("--config", str(atlas_config), "--environment.search.reward", "docs.examples.rewards:brief")
    status, output = cusearch("data", "check", path, *own)
    assert status == 0
    assert "2 have no gold answers: EM and F1 are 0, and only a reward of yours scores them" in output
    assert output.count("gold answers: none") == 2


def test_lengths_are_checked_by_a_runs_model_and_template_and_else_said_not_to_be(cusearch, write, atlas_config):
    path = write(GOOD, GOOD | {"id": "2", "question": "who " * 500})
    status, output = cusearch("data", "check", path)
    assert status == 0
    assert "lengths were not checked: they depend on the model and the template of a run; add --config CONFIG" in output
    status, output = cusearch("data", "check", path, "--config", str(atlas_config))
    assert status == 1
    assert "not checked" not in output
    assert "1 problem" in output
    assert re.search(r"line 2: its prompt has \d+ tokens, over episode\.max_prompt_tokens \(96\)", output)
    longer = ("--episode.max_prompt_tokens", "9000")
    assert cusearch("data", "check", path, "--config", str(atlas_config), *longer)[0] == 0


def test_of_many_problems_the_first_are_shown(cusearch, write):
    status, output = cusearch("data", "check", write(*(["{"] * 50)))
    assert status == 1
    assert output.count("is not JSON") == 20
    assert "and 30 more" in output
    assert "no question can be used" in output


def test_convert_writes_what_is_read_back(cusearch, write, tmp_path):
    source, output = write(GOOD, GOOD | {"id": "2"}), tmp_path / "new" / "train.parquet"
    status, said = cusearch("data", "convert", source, "--output", str(output))
    assert status == 0
    assert "2 questions in" in said
    assert load_questions([str(output)]) == load_questions([source])


def test_questions_of_two_files_are_warned_of(cusearch, tmp_path):
    """As a list in data.source they would be trained on twice."""
    for name, question in (("a", "who wrote it"), ("b", "Who wrote it?")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(GOOD | {"id": name, "question": question}) + "\n")
    status, output = cusearch("data", "check", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert status == 0
    assert "1 question of earlier files, first line 1: also asked in" in " ".join(output.split())


def test_convert_does_not_write_over_what_it_reads(cusearch, write, tmp_path):
    source = Path(write(GOOD | {"note": "keep me"}))
    before, link = source.read_bytes(), tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output in (source, link):
        said = cusearch("data", "convert", str(source), "--output", str(output))[0]
        assert said == f"cusearch: --output {output} is a file that is read; choose another"
    assert source.read_bytes() == before


def test_a_huge_question_is_not_shown_whole(cusearch, write):
    _, output = cusearch("data", "check", write(GOOD | {"question": "why " * 100_000}))
    assert "characters)" in output
    assert len(output) < 20_000


def test_three_questions_are_shown_as_they_are_asked_and_scored(cusearch, write, atlas_config):
    rows = [GOOD | {"id": str(i), "question": f"who wrote {i}", "answer_aliases": [f"J{i}"]} for i in range(9)]
    _, output = cusearch("data", "check", write(*rows))
    output = " ".join(output.split())
    for i in (0, 4, 8):
        assert f"nq/{i} Answer the given question." in output
        assert f"Question: who wrote {i}? gold answers: James Joyce | J{i}" in output
    assert "who wrote 1?" not in output
    _, output = cusearch("data", "check", write(*rows), "--config", str(atlas_config))
    assert "nq/4 Question: who wrote 4? gold answers:" in " ".join(output.split()), "the template of the config"


def test_a_file_is_measured_by_the_environment_that_asks_it(cusearch, write, atlas_config, tmp_path):
    """All were measured by that of held-out questions."""
    path, other = write(GOOD, name="long.jsonl"), write(GOOD, name="other.jsonl")
    two = tmp_path / "two.toml"
    two.write_text(f'[environment.long]\nsource = "{path}"\ntemplate = "paper"\n[episode]\nmax_prompt_tokens = 40\n')
    status, output = cusearch("data", "check", path, other, "--config", str(atlas_config), str(two))
    assert status == 1
    assert re.search(r"prompts of environment.long have \d{3} tokens", output)
    assert re.search(r"line 1: its prompt has \d{3} tokens, over episode\.max_prompt_tokens \(40\)", output)
    assert re.search(r"prompts of environment.search have \d\d? tokens", output)
    assert output.count("1 problem") == 1


def test_what_convert_cannot_read_is_its_own(cusearch, tmp_path):
    """No data.source is involved."""
    said = cusearch("data", "convert", "gone.jsonl", "--output", str(tmp_path / "x.jsonl"))[0]
    assert said.startswith("cusearch: data convert: cannot read gone.jsonl")


def test_the_lengths_of_prompts_are_told_where_a_config_names_the_tokenizer(cusearch, write, atlas_config):
    _, output = cusearch("data", "check", write(GOOD, GOOD | {"id": "2", "question": "who " * 30}), "--config", "atlas")
    mean, longest = map(int, re.search(r"prompts have (\d+) tokens in the mean, the longest (\d+)", output).groups())
    assert 0 < mean < longest < 2 * mean


def test_a_prompt_that_a_run_cannot_make_is_a_problem_of_its_row(cusearch, write, monkeypatch):
    def refuse(tokenizer, prompt, arguments):
        raise EpisodeFailed(f"cannot ask {prompt.text}")

    monkeypatch.setattr("cusearch_async.rollout.prompting.build_prompt", refuse)
    status, output = cusearch("data", "check", write(GOOD), "--config", "atlas")
    assert status == 1
    assert "line 1: cannot ask who wrote Dubliners?" in output


def test_questions_that_are_asked_twice_are_named_and_no_problem(cusearch, write):
    again = [GOOD | {"id": f"a{i}", "question": text} for i, text in enumerate(["Who wrote “Dubliners”?", "who else"])]
    status, output = cusearch("data", "check", write(GOOD, *again))
    assert status == 0
    assert "1 question is asked more than once (line 1, line 2)" in output


def test_questions_that_held_out_files_ask_too_are_problems(cusearch, write):
    train = write(GOOD, GOOD | {"id": "2", "question": "who else"}, name="a.jsonl")
    held_out = [write({"question": "Who else?", "answer": "x"}, name="b.jsonl"), write(GOOD | {"question": "q"})]
    assert cusearch("data", "check", train)[0] == 0
    status, output = cusearch("data", "check", train, "--against", *held_out)
    assert status == 1
    assert "2 good rows, 1.0 answers each; 1 problem" in output
    assert f"line 2: also asked in {held_out[0]}, line 1: 'who else?'" in output
    assert cusearch("data", "check", train, "--against", held_out[1])[0] == 0
    asked_alone = write({"question": "Who else?"}, name="alone.jsonl")
    assert cusearch("data", "check", train, "--against", asked_alone)[0] == 1, "texts are compared, not answers"
    half_read = write({"question": "Who else?", "answer": "x"}, {"answer": "q"}, name="half.jsonl")
    status, output = cusearch("data", "check", held_out[1], "--against", half_read)
    assert status == 1, "what was not read was not compared"
    assert f"--against {half_read}: 1 problem, first line 2: 'question' must be" in output
    assert "--against: cannot read" in cusearch("data", "check", train, "--against", "gone.jsonl")[0]


def test_questions_that_differ_in_a_symbol_or_a_vowel_sign_are_others():
    assert asked("What is C++?") == asked("what is  c++") != asked("What is C#?")
    assert asked("कील क्या है?") != asked("काल क्या है?")
    assert asked("Is it 5 %?") != asked("Is it 5?")
    assert asked("Who -- `Peru`?") == asked("who, Peru")


@pytest.mark.parametrize(
    ("one", "other"), [("12*4", "12/4"), ("-5", "5"), ("3.5", "3,5"), ("10²", "102"), ("10-2", "10 2")]
)
def test_questions_that_differ_in_a_sign_of_a_number_are_others(one, other):
    assert asked(f"What is {one}?") != asked(f"What is {other}?")
    assert asked(f"What is {one}?") == asked(f"what  is {one}")


def test_each_of_two_rows_with_one_id_is_named_by_its_own_line(cusearch, write):
    rows = [GOOD | {"question": text} for text in ("x", "y", "z")]
    rows[0] |= {"golden_answers": ["the"]}
    rows[2] |= {"golden_answers": ["an"]}
    output = " ".join(cusearch("data", "check", write(*rows))[1].split())
    assert "(line 1: 'the'; line 3: 'an')" in output


def test_ids_that_two_files_share_are_told(cusearch, write):
    files = [write(GOOD | {"question": name}, name=f"{name}.jsonl") for name in "ab"]
    output = " ".join(cusearch("data", "check", *files)[1].split())
    assert "1 id of earlier files, first 'nq/1'; for one run give each question its own id" in output
    other = write(GOOD | {"question": "c", "data_source": "mine"}, name="c.jsonl")
    assert "of earlier files" not in cusearch("data", "check", files[0], other)[1]


def test_a_file_of_the_home_folder_is_found(cusearch, write, monkeypatch, tmp_path):
    write(GOOD)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cusearch("data", "check", "~/train.jsonl")[0] == 0


def test_answers_that_may_be_several_in_one_text_are_named(cusearch, write):
    texts = ["a || b", "a | b", "a; b", "a b"]
    joined = [GOOD | {"id": str(i), "golden_answers": [text]} for i, text in enumerate(texts)]
    status, output = cusearch("data", "check", write(*joined))
    assert status == 0
    output = " ".join(output.split())
    assert "3 gold answers may be several in one text (line 1: 'a || b'; line 2: 'a | b'; line 3: 'a; b')" in output
