"""The names of vLLM that our code uses exist in the vLLM that is installed; `make test-cuda-contract` asks the same of
the CUDA builds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cuda_contract.names import CONTRACT, OPTIONS, called, missing, offers


@pytest.fixture(scope="module")
def vllm() -> Path:
    """Its sources; it is not imported."""
    return Path(find_spec("vllm").submodule_search_locations[0])


@pytest.mark.parametrize("contract", [CONTRACT, OPTIONS], ids=["called", "options"])
def test_vllm_has_what_we_ask_of_it(vllm, contract):
    assert missing(vllm, contract) == []


def test_whatever_the_engine_asks_of_vllm_is_in_the_contract():
    known = set().union(*CONTRACT.values(), *OPTIONS.values())
    known |= {place.partition(":")[2].partition(".")[0] for place in CONTRACT | OPTIONS}
    assert called() <= known, f"add to CONTRACT, with their place: {sorted(called() - known)}"
    assert {"AsyncLLM", "pause_generation", "FINAL_ONLY", "logprobs_mode", "is_cpu"} <= called(), "it finds them"


SOURCE = '''
class Base:
    inherited: int = 1

class Engine(Base):
    """Says reload, which is no attribute."""
    field: str

    def __init__(self):
        self.processor = 1
        local = 2

    async def pause(self, *, mode: str = "keep") -> None:
        """With mode."""

Mode = Literal["abort", "keep"]
variables: dict[str, int] = {"A_VARIABLE": 1}
'''


@pytest.mark.parametrize(
    ("place", "names", "wrong"),
    [
        ("a.py:Engine", {"inherited", "field", "processor", "pause"}, "local"),
        ("a.py:Engine.pause", {"mode"}, "clear_cache"),
        ("a.py:Mode", {"keep"}, "wait"),
        ("a.py:variables", {"A_VARIABLE"}, "B_VARIABLE"),
    ],
)
def test_a_name_that_is_gone_is_reported_with_its_place(tmp_path, place, names, wrong):
    (tmp_path / "a.py").write_text(SOURCE)
    assert names <= offers(tmp_path, place)
    assert missing(tmp_path, {place: names | {wrong}}) == [f"{place} has no {wrong}"]


def test_a_place_that_is_gone_is_reported(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    places = ["b.py:Engine", "a.py:Worker", "a.py:Engine.resume"]
    assert missing(tmp_path, {place: set() for place in places}) == [f"{place} is not there" for place in places]
