"""Fixtures: encoders of three families, and passages."""

from __future__ import annotations

import faiss
import pytest
import torch
from transformers import BertConfig, BertModel, MPNetConfig, MPNetModel, T5Config, T5Model

from cusearch_async.config import DenseConfig
from tests.retrieval.encoders import SMALL, corpus, save_model


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models as small as these lose more by waiting for threads than they gain."""
    threads = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield
    torch.set_num_threads(threads[0])
    faiss.omp_set_num_threads(threads[1])


@pytest.fixture(scope="session")
def encoders(tmp_path_factory):
    """Folders of untrained encoders, by family."""
    folder = tmp_path_factory.mktemp("encoders")
    t5 = {key: SMALL[key] for key in ("vocab_size", "pad_token_id")}
    t5 |= {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "initializer_factor": 5.0}
    return {
        "bert": save_model(folder / "bert", BertModel, BertConfig(**SMALL)),
        "other": save_model(folder / "other", BertModel, BertConfig(**SMALL), seed=1),
        "mpnet": save_model(folder / "mpnet", MPNetModel, MPNetConfig(**SMALL)),
        "t5": save_model(folder / "t5", T5Model, T5Config(**t5)),
    }


@pytest.fixture(scope="session")
def settings(encoders):
    def make(family="bert", **values):
        usual = {"query_prefix": "query: ", "passage_prefix": "passage: "}
        usual |= {"max_passage_tokens": 64, "max_query_tokens": 64}
        return DenseConfig(encoder=encoders[family], **usual | values)

    return make


@pytest.fixture(scope="session")
def passages():
    return corpus(400)
