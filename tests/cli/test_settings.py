"""`cusearch config` and `cusearch config --schema`: every setting, for people and for editors."""

from __future__ import annotations

import tomllib

import jsonschema
import pytest

from cusearch_async.cli.config import reference, schema
from cusearch_async.config import load_config, shipped_configs


@pytest.fixture(scope="module")
def validate():
    """Raises: ValidationError."""
    return jsonschema.Draft202012Validator(schema()).validate


def test_the_schema_is_one():
    assert schema()["$schema"] == jsonschema.Draft202012Validator.META_SCHEMA["$id"]
    jsonschema.Draft202012Validator.check_schema(schema())


@pytest.mark.parametrize("path", list(shipped_configs().values()), ids=lambda path: path.stem)
def test_the_shipped_configs_keep_to_the_schema(validate, path):
    validate(tomllib.loads(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("[run]\nname = 'r'\n[learner]\nlearning_rate = 1", "'learning_rate' was unexpected"),
        ("[run]\nname = 'r'\n[learner]\nlr = 0", "0 is less than or equal to the minimum of 0"),
        ("[run]\nname = 'r'\n[environment.a]\nshare = 'x'", "'x' is not of type 'integer'"),
        ("[run]\nname = 'a b'", "'a b' does not match"),
        ("[run]\nsteps = 1", "'name' is a required property"),
    ],
)
def test_what_a_config_must_not_hold_the_schema_refuses(validate, text, where):
    with pytest.raises(jsonschema.ValidationError, match=where):
        validate(tomllib.loads(text))


def test_every_setting_of_the_schema_has_a_meaning_for_the_editor_to_show():
    for section, properties in ((name, found.get("properties", {})) for name, found in schema()["$defs"].items()):
        for name, found in properties.items():
            assert found.get("description") or "$ref" in found, f"{section}.{name}"


def test_a_runs_settings_are_those_of_its_method_and_its_environments(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nname = "r"\n[method]\nname = "random"\n[environment.a]\n[environment.b]\nshare = 2\n', encoding="utf-8"
    )
    shown = reference(load_config(path))
    assert "`method.phase_reserve`" not in shown
    assert "### environment.a\n" in shown
    assert "- `environment.b.share` (`2`, shared): " in shown
    assert "- `environment.b.format_weight` (`0.2`, shared): " in shown
