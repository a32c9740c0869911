"""What is printed: whole characters, nothing that a terminal obeys, tables that fit into 80 columns, help for all."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from transformers import AutoTokenizer

from cusearch_async.cli import buffer, evaluate, view
from cusearch_async.cli.preflight.gpus import stages
from cusearch_async.cli.preflight.shapes import published
from cusearch_async.cli.preflight.sizing import GIB
from cusearch_async.cli.terminal import visible
from cusearch_async.config import load_config
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
    return WorkerStatus(heartbeat_age_s=1234, retriever_down_s=1234, **figures)


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
        view.workers({ESCAPE: status_of_a_worker()}),
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
    now = view.Snapshot(
        0.0, state, Ledger(finished=123456, buffered=123456),
        Queues(ready_of_pool=64, is_claimed=False, ready=1234, leased=123, requeued=12, incomplete=3),
        {(depth, 203 - age): 1234 for depth in range(6) for age in range(3)}, {WORKER: status_of_a_worker()},
    )  # fmt: skip
    shape = published("Qwen/Qwen2.5-7B")
    return {
        "eval": evaluate.table(
            {"2wikimultihopqa": score, "a/folder/my_questions.jsonl": score, "all": score}, "greedy"
        ),
        "check": stages(config, shape, 80 * GIB),
        "ls": buffer.table([row(question="Who " * 40, prediction="me " * 20)]),
        "workers": view.workers({WORKER: status_of_a_worker()}),
        "buckets": view.buckets(now, config),
        "groups": view.groups(now, None, config),
    }


@pytest.mark.parametrize("name", ["eval", "check", "ls", "workers", "buckets", "groups"])
def test_a_table_fits_into_80_columns(name, atlas_config):
    printed = text_of(tables(atlas_config)[name], width=76 if name in ("workers", "buckets", "groups") else 80)
    assert "…" not in printed
    wide = text_of(tables(atlas_config)[name], width=300).splitlines()
    for word in " ".join(wide[:4]).split():  # every header and every figure of the first row is whole
        if word not in WORKER and "|" not in word:
            assert word in printed, word
