"""Pooling and prefixes in an encoder's folder: used, and never contradicted."""

from __future__ import annotations

import json

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RemoteEntryNotFoundError

from cusearch_async.config import DenseConfig
from cusearch_async.errors import ConfigError
from cusearch_async.retrieval import encoder_folder
from cusearch_async.retrieval.encoder_folder import resolved
from tests.retrieval.encoders import says_pooling


def use(settings):
    found = resolved(settings)
    return found.pooling, found.query_prefix, found.passage_prefix


def says(folder, file, content):
    (folder / file).write_text(json.dumps(content))


def modules(*kinds):
    return [{"idx": i, "path": f"{i}_{kind}", "type": f"sentence_transformers.models.{kind}"} for i, kind in kinds]


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(("mode", "pooling"), [("cls", "cls"), ("mean", "mean"), ("lasttoken", "last")])
def test_pooling_is_the_folders(tmp_path, mode, pooling, compact):
    says_pooling(tmp_path, mode, compact=compact)
    assert use(DenseConfig(encoder=str(tmp_path))) == (pooling, "", "")
    assert use(DenseConfig(encoder=str(tmp_path), pooling=pooling)) == (pooling, "", "")


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_another_pooling_than_the_folders_is_refused(tmp_path, pooling):
    mode = "lasttoken" if pooling != "last" else "cls"
    says_pooling(tmp_path, mode)
    with pytest.raises(
        ConfigError,
        match=rf"retriever\.dense\.pooling '{pooling}' contradicts 1_Pooling/config\.json of .* '(last|cls)'; leave it",
    ):
        resolved(DenseConfig(encoder=str(tmp_path), pooling=pooling))


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("modes", [("max",), ("weightedmean",), ("cls", "mean")])
def test_a_pooling_that_is_not_supported_is_refused(tmp_path, modes, compact):
    says_pooling(tmp_path, *modes, compact=compact)
    with pytest.raises(ConfigError, match=rf"pools by {modes[0]}.*; only mean, cls and lasttoken are supported"):
        resolved(DenseConfig(encoder=str(tmp_path)))


def test_a_folder_that_states_nothing_leaves_the_mean_and_no_prefixes(tmp_path):
    assert use(DenseConfig(encoder=str(tmp_path))) == ("mean", "", "")
    asked = DenseConfig(encoder=str(tmp_path), pooling="last", query_prefix="q ", passage_prefix="p ")
    assert use(asked) == ("last", "q ", "p ")
    assert resolved(asked) == resolved(resolved(asked))


def test_the_modules_name_the_place_of_the_pooling(tmp_path):
    says(tmp_path, "modules.json", modules((0, "Transformer"), (3, "Pooling"), (4, "Normalize")))
    (tmp_path / "3_Pooling").mkdir()
    says(tmp_path, "3_Pooling/config.json", {"pooling_mode_cls_token": True})
    assert use(DenseConfig(encoder=str(tmp_path)))[0] == "cls"
    with pytest.raises(ConfigError, match=r"normalize False contradicts modules\.json of .* True; leave it out"):
        resolved(DenseConfig(encoder=str(tmp_path), normalize=False))


def test_a_module_that_is_not_applied_is_refused(tmp_path):
    says(tmp_path, "modules.json", modules((0, "Transformer"), (1, "Pooling"), (2, "Dense")))
    with pytest.raises(ConfigError, match=r"has a module 'Dense' \(modules\.json\); only Transformer, Pooling"):
        resolved(DenseConfig(encoder=str(tmp_path)))


@pytest.mark.parametrize(
    ("said", "prefixes"),
    [
        ({"prompts": {"query": "Query: ", "document": "Text: "}}, ("Query: ", "Text: ")),
        ({"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None}, ("Query: ", "")),
        ({"prompts": {"passage": "passage: "}}, ("", "passage: ")),
        ({"prompts": {"any": "Text: "}, "default_prompt_name": "any"}, ("Text: ", "Text: ")),
        ({"prompts": {"query": "", "document": ""}}, ("", "")),
        ({"prompts": None}, ("", "")),
        ({"prompts": ["query: "]}, ("", "")),
        ({"__version__": {}}, ("", "")),
    ],
)
def test_prefixes_are_the_folders_prompts(tmp_path, said, prefixes):
    says(tmp_path, "config_sentence_transformers.json", said)
    assert use(DenseConfig(encoder=str(tmp_path)))[1:] == prefixes


def test_another_prefix_than_the_folders_is_refused(tmp_path):
    says(tmp_path, "config_sentence_transformers.json", {"prompts": {"query": "Query: ", "document": ""}})
    with pytest.raises(
        ConfigError, match=r"query_prefix 'query: ' contradicts config_sentence_transformers\.json .*'Query: '"
    ):
        resolved(DenseConfig(encoder=str(tmp_path), query_prefix="query: "))
    assert use(DenseConfig(encoder=str(tmp_path), passage_prefix="passage: "))[1:] == ("Query: ", "passage: ")


def test_where_no_prompt_is_for_queries_the_setting_must_name_one(tmp_path):
    says(tmp_path, "config_sentence_transformers.json", {"prompts": {"web_search_query": "Given a: ", "sts": "b"}})
    with pytest.raises(ConfigError, match=r"query_prefix must be set: .* the prompts web_search_query, sts, and none"):
        resolved(DenseConfig(encoder=str(tmp_path)))
    assert use(DenseConfig(encoder=str(tmp_path), query_prefix="Given a: "))[1] == "Given a: "


def test_a_mean_without_the_prompts_tokens_is_refused(tmp_path):
    (tmp_path / "1_Pooling").mkdir()
    says(tmp_path, "1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False})
    assert use(DenseConfig(encoder=str(tmp_path)))[0] == "mean"
    with pytest.raises(ConfigError, match="leaves its prompts out of the mean"):
        resolved(DenseConfig(encoder=str(tmp_path), query_prefix="Represent this: "))


@pytest.mark.parametrize("text", ["{", "[]", '"cls"', "\udcff"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "config_sentence_transformers.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"retriever\.dense\.encoder .*config_sentence_transformers\.json"):
        resolved(DenseConfig(encoder=str(tmp_path)))


# From the Hub.


def hub(monkeypatch, error):
    def download(repository, file):
        raise error

    monkeypatch.setattr(encoder_folder, "hf_hub_download", download)
    monkeypatch.setattr(encoder_folder, "try_to_load_from_cache", lambda repository, file: None)


def test_the_default_encoder_has_its_prefixes_and_others_none(monkeypatch):
    class Response:
        status_code, headers, request = 404, {}, None

    hub(monkeypatch, RemoteEntryNotFoundError("no such file", response=Response()))
    assert use(DenseConfig()) == ("mean", "query: ", "passage: ")
    assert use(DenseConfig(query_prefix="")) == ("mean", "", "passage: ")
    assert use(DenseConfig(encoder="BAAI/bge-base-en-v1.5")) == ("mean", "", "")


def test_without_the_hub_the_settings_must_name_all(monkeypatch):
    hub(monkeypatch, LocalEntryNotFoundError("offline"))
    with pytest.raises(
        ConfigError, match=r"its pooling and prefixes are unknown \(modules\.json is not in the cache.* or set"
    ):
        resolved(DenseConfig())
    said = DenseConfig(pooling="mean", query_prefix="query: ", passage_prefix="passage: ")
    assert resolved(said) == said
