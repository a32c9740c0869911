"""What is printed: whole characters, nothing that a terminal obeys, tables that fit into 80 columns, help for all."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console
from transformers import AutoTokenizer

from cusearch_async.cli import buckets, buffer
from cusearch_async.cli import eval as evaluate
from cusearch_async.cli.preflight.finding import STYLES, Finding
from cusearch_async.cli.preflight.finding import table as table_of_findings
from cusearch_async.cli.preflight.memory import stages
from cusearch_async.cli.preflight.shapes import published
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.config import Config, load_config
from cusearch_async.surrogates import visible
from cusearch_async.transport.interface import Ledger, Queues, RunState, TrajectoryRow, WorkerStatus
from tests.fakes import STARTER
from tests.strategies import make_trajectory

ESCAPE = "\x1b[31mred\x1b[0m \x9b2J \u202eback\u202c \ud83d"
SHOWN = "\\u001b[31mred\\u001b[0m \\u009b2J \\u202eback\\u202c \\ud83d"
WORKER = "a-host-with-a-long-name-0042-1234567"


def text_of(shown: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(shown)
    return console.file.getvalue()


def row(**fields: str) -> TrajectoryRow:
    known = {"depth": "3", "version": "9", "reward": "0.95", "em": "1", "turns": "4", "tokens": "1234", "bytes": "9"}
    return TrajectoryRow("123456:12", known | {"worker": WORKER, "question": "Who?", "prediction": "me"} | fields, 2)


def status_of_a_worker() -> WorkerStatus:
    figures = {"version": 1234, "in_flight": 192, "episodes": 123456, "busy_s": 10, "sampled_tokens": 123456}
    return WorkerStatus(heartbeat_age_s=9.9, retriever_down_s=1234, **figures)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(STARTER)


def test_control_characters_are_written_out():
    assert visible(ESCAPE) == SHOWN
    assert visible("Bragança\t日本\n😀") == "Bragança\t日本\n😀"


def test_what_others_wrote_moves_no_cursor(tokenizer):
    hostile = replace(make_trajectory(0), question=ESCAPE, answers=(ESCAPE,), prediction=ESCAPE, worker=ESCAPE)
    for shown in (
        buffer.table([row(question=ESCAPE, prediction=ESCAPE, worker=ESCAPE)]),
        buffer.overview(hostile, {}),
        buffer.marked(tokenizer(ESCAPE[:-1], add_special_tokens=False)["input_ids"], np.zeros(99), tokenizer),
        buckets.workers({ESCAPE: status_of_a_worker()}, 60.0),
    ):
        printed = text_of(shown, width=400)
        assert "\x1b" not in printed
        assert "\x9b" not in printed
        assert "\\u001b[31mred" in printed


@pytest.mark.parametrize("text", ["Bragança", "Where is 東京, São Paulo or 😀?", "ç", "a\ufffdb", "ends in \ufffd"])
def test_a_turn_is_shown_in_whole_characters(text, tokenizer):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    logprobs = np.full(len(ids), -0.1)
    logprobs[-1] = -9.0
    shown = buffer.marked(ids, logprobs, tokenizer)
    assert shown.plain == text
    assert "underline" in str(shown.spans[-1].style)


def test_half_a_character_at_the_end_of_a_turn_is_shown_as_such(tokenizer):
    ids = tokenizer("ç", add_special_tokens=False)["input_ids"][:1]
    assert buffer.marked(ids, np.zeros(1), tokenizer).plain == "\ufffd"


def tables(atlas_config: Path) -> dict[str, object]:
    config = load_config(atlas_config)
    interval = [0.123, 0.987]
    score = {"count": 14267} | dict.fromkeys(evaluate.COLUMNS, 0.55)
    score |= {f"{name}_interval": interval for name in evaluate.COLUMNS}
    state = RunState(epoch=12, step=203, fields={"phase": 4}, published=203, weights="v000203-e12", next_ticket=99999)
    now = buckets.Snapshot(
        0.0, state, Ledger(finished=123456, buffered=123456), 204,
        Queues(ready_of_pool=64, is_claimed=False, ready=1234, leased=123, requeued=12, incomplete=3),
        {(depth, 203 - age): 1234 for depth in range(6) for age in range(3)}, {WORKER: status_of_a_worker()},
    )  # fmt: skip
    shape = published("Qwen/Qwen2.5-7B")
    return {
        "eval": evaluate.table({"2wikimultihopqa": score, "my_questions, 2 hops": score, "all": score}, "greedy"),
        "check": stages(config, shape, 80 * GIB),
        "workers": buckets.workers({WORKER: status_of_a_worker()}, 60.0),
        "buckets": buckets.buckets(now, config),
        "groups": buckets.groups(now, None, config),
    }


@pytest.mark.parametrize(
    "name", [pytest.param("eval", marks=pytest.mark.system), "check", "workers", "buckets", "groups"]
)
def test_a_table_fits_into_80_columns(name, atlas_config):
    printed = text_of(tables(atlas_config)[name], width=76 if name in ("workers", "buckets", "groups") else 80)
    assert "…" not in printed
    wide = text_of(tables(atlas_config)[name], width=300).splitlines()
    for word in " ".join(wide[:4]).split():  # every header and every figure of the first row is whole
        if word not in WORKER and "|" not in word:
            assert word in printed, word


def snapshot(config: Config, workers: int, **changes: Any) -> buckets.Snapshot:
    """In the middle of a run of 203 steps, as full as it gets."""
    state = RunState(
        epoch=12, step=5, fields={"phase": 4}, published=5, weights="v000005-e12", next_ticket=99999, **changes
    )
    counts = dict.fromkeys(Ledger.__dataclass_fields__, 123456)
    queues = Queues(ready_of_pool=64, is_claimed=False, ready=1234, leased=123, requeued=12, incomplete=3)
    cells = {(depth, 5 - age): 1234 // (1 + depth) for depth in range(6) for age in range(3)}
    names = {f"{WORKER}-{number}": status_of_a_worker() for number in range(workers)}
    return buckets.Snapshot(0.0, state, Ledger(**counts), 6, queues, cells, names)


@pytest.mark.parametrize("workers", [1, 16])
def test_buckets_show_all_but_many_workers_on_80_columns_and_24_lines(atlas_config, workers):
    config = load_config(atlas_config)
    now = snapshot(config, workers)
    seen = "\n".join(text_of(buckets.view(now, replace(now, at=-1.0), config)).splitlines()[:24])
    for part in (
        "trains on",
        "pool 5",
        "pool 6",
        "64 of 64 ready",
        "3 groups",
        "lost 123456",
        "late refused",
        "finished",
    ):
        assert part in seen, part
    assert "…" not in seen
    assert max(map(len, seen.splitlines()[:-1])) <= 80


def test_a_listing_has_one_line_a_trajectory_whatever_the_question_is():
    odd = [
        row(question="Who\nwas\t" * 99, prediction="a b\n" * 40),
        row(question="東京 " * 60),
        row(question="", prediction=""),
    ]
    lines = text_of(buffer.table(odd)).splitlines()
    assert len(lines) == 1 + len(odd)
    assert all(cell_len(line) <= 80 for line in lines)
    assert lines[1].count("…") == 2
    assert "Who was Who was" in lines[1]


def test_no_screen_uses_a_colour_that_is_lost_on_light_or_on_dark_terminals(atlas_config, tokenizer):
    """Black, white, grey and exact colours are: a theme of the terminal does not change them."""
    config = load_config(atlas_config)
    answered = make_trajectory(0)
    statuses = [Finding(status, "what", "text") for status in STYLES]
    screens = [
        buckets.view(snapshot(config, 2, paused=True), None, config),
        *buffer.turns(answered, tokenizer),
        buffer.overview(answered, {}),
        table_of_findings(statuses),
        *tables(atlas_config).values(),
    ]
    for screen in screens:
        file = io.StringIO()
        Console(file=file, width=80, force_terminal=True, color_system="truecolor").print(screen)
        for codes in re.findall("\x1b\\[([0-9;]*)m", file.getvalue()):
            lost = {"30", "37", "38", "40", "47", "48", "90", "97", "100", "107"} & set(codes.split(";"))
            assert not lost, (codes, file.getvalue())


def test_a_worker_that_is_starting_is_listed_with_what_it_does():
    shown = text_of(buckets.workers({"a-host-42": WorkerStatus(starting="loading vLLM", alive_s=20.4)}, 60.0))
    assert "loading vLLM, 20 s" in shown
    shown = text_of(buckets.workers({"a-host-42": WorkerStatus(heartbeat_age_s=11)}, 60.0))
    assert "silent" in shown
    assert " ok" not in shown


def test_a_worker_whose_engine_hangs_is_not_ok():
    hanging = {"a-host-42": WorkerStatus(in_flight=4, last_token_age_s=40.0)}
    assert "no token for 40 s" in text_of(buckets.workers(hanging, 20.0))
    assert " ok" not in text_of(buckets.workers(hanging, 20.0))
    assert " ok" in text_of(buckets.workers(hanging, 60.0)), "its leases are renewed"
