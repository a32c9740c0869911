"""The plan of a study, from its TOML file: which runs it consists of, and what is measured.

[study] has name, configs and baseline, [settings] the settings of every run; each [[part]] a grid of settings, of which
it has every combination with every seed; each [[claim]] what is to be tested. configs/studies/ has an example."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BeforeValidator, Field, ValidationError

from cusearch_async.config import Config, flat, load_config, overrides_of
from cusearch_async.config.messages import explain_unknown_setting
from cusearch_async.config.section import NAME, Folder, Section
from cusearch_async.config.toml import read_toml
from cusearch_async.errors import ConfigError
from cusearch_async.extensions import as_list
from cusearch_async.study.messages import explain_study

Value = bool | int | float | str | list[Any]
Measure = Literal["em_last", "em_area", "depth_growth"]
Dotted = BeforeValidator(lambda given: dict(flat(given)) if isinstance(given, dict) else given)
"""Of a table whose keys may be written without quotes."""
SettingValues = Annotated[dict[str, Value], Dotted]
"""Dotted key of a setting -> its value."""
Context = tuple[tuple[str, Any], ...]
"""Settings and their values."""
PLACES = ("weights.folder", "weights.objects", "learner.checkpoint_objects")
"""Where each run of a study has a place below that of the configs."""
OF_A_RUN = ("run.name", "run.folder", "run.seed", "redis.url", "retriever.url", *PLACES)
"""Settings that the study gives each of its runs."""


class StudySection(Section):
    name: str = Field(pattern=NAME)
    configs: Annotated[tuple[Folder, ...], BeforeValidator(as_list)] = Field(min_length=1)
    """The config files of all runs, as `cusearch launch` takes them."""
    primary: tuple[Literal["em_last", "em_area"], ...] = Field(("em_last", "em_area"), min_length=1)
    """Held-out greedy exact match after the last step, and its mean over the run (the area under its curve). Fixed once
    the study has a run."""
    baseline: SettingValues = Field(min_length=1)
    """Settings of the runs that the others are compared with."""


class Part(Section):
    name: str = Field(pattern=NAME)
    asks: str = ""
    """Its purpose, a sentence of the report."""
    seeds: int = Field(ge=1)
    """Runs of each combination, with run.seed 0, 1, …"""
    settings: SettingValues = Field({})
    """Settings of all its runs."""
    baseline: SettingValues = Field({})
    """Instead of study.baseline."""
    beside: str = ""
    """Another part: each run is also compared with the one of that part that differs in `settings` alone."""
    grid: Annotated[dict[str, Annotated[tuple[Value, ...], Field(min_length=1)]], Dotted] = Field({})
    """Setting -> its values."""


class Reported(Section):
    """A result of somebody else for a claim."""

    difference: float
    """In the measure, such as 0.118 for 11.8 points of exact match."""
    where: SettingValues = Field({})
    """Settings that the claim does not name; empty for any."""
    measure: Measure = "em_last"


class Claim(Section):
    """Tested once for each setting of what it does not name. Claims cannot be changed once the study has a run."""

    text: str = Field(min_length=1)
    part: str
    """Name of the part whose runs it is about."""
    better: SettingValues = Field(min_length=1)
    """Settings of the runs that are claimed to be better."""
    than: SettingValues = Field({})
    """Settings of those that they are compared with; empty for none: the measure itself is claimed to be above 0."""
    more_where: SettingValues = Field({})
    """Settings where the difference is claimed to be larger than elsewhere; empty for no such claim."""
    measures: tuple[Measure, ...] = ()
    """Empty for study.primary."""
    reported: tuple[Reported, ...] = ()
    """May be added at any time."""

    @property
    def named(self) -> set[str]:
        return {*self.better, *self.than, *self.more_where}

    @property
    def sides(self) -> list[dict[str, Value]]:
        return [self.better, self.than] if self.than else [self.better]

    def halves(self, runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
        """Those where more is claimed, and the others; else all."""
        if not self.more_where:
            return [list(runs)]
        return [[run for run in runs if has(run, self.more_where) == there] for there in (True, False)]


class StudyFile(Section):
    study: StudySection
    settings: SettingValues = Field({})
    part: tuple[Part, ...] = Field(min_length=1)
    claim: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedRun:
    id: str
    """Readable, and different for different settings."""
    settings: dict[str, Value]
    """From the study file, as the first of its parts writes them."""
    seed: int
    config: Config
    """Resolved; without OF_A_RUN."""
    parts: list[str] = field(default_factory=list)
    """The parts that it belongs to. Two parts share a run whose settings are the same."""
    written: list[dict[str, Value]] = field(default_factory=list)
    """The settings as each of these parts writes them: 1e-6 as a number or as a text, say."""

    def arguments(self) -> list[str]:
        """The settings as overrides of a command line."""
        return overrides_of(self.settings | {"run.seed": self.seed})


@dataclass(frozen=True, slots=True)
class Plan:
    study: StudySection
    parts: tuple[Part, ...]
    claims: tuple[Claim, ...]
    varied: tuple[str, ...]
    """Settings that differ between runs: columns of the tables."""
    runs: dict[str, PlannedRun]
    """By id, in the order of the parts; the seeds of a combination alternate with other combinations."""

    def of(self, part: str) -> list[PlannedRun]:
        return [run for run in self.runs.values() if part in run.parts]

    def differing(self, part: str) -> list[str]:
        """The settings that differ between the runs of a part."""
        runs = self.of(part)
        return [key for key in self.varied if len({str(found_in(run.config, key)) for run in runs}) > 1]

    def contexts(self, part: str, named: Collection[str]) -> dict[Context, list[PlannedRun]]:
        """The runs of a part, by their values of the settings that differ in it and are not `named`."""
        return grouped(self.of(part), [key for key in self.differing(part) if key not in named])

    def pairs(self, part: Part) -> dict[str, str]:
        """The runs of a part -> those of the part `beside` it that differ from them in its settings alone."""
        same = [key for key in self.varied if key not in part.settings]

        def shared(run: PlannedRun) -> tuple[Any, ...]:
            return run.seed, *(str(found_in(run.config, key)) for key in same)

        others = {shared(run): run.id for run in self.of(part.beside)}
        found = {run.id: others.get(shared(run), run.id) for run in self.of(part.name)}
        return {name: other for name, other in found.items() if other != name}

    def baseline(self, part: Part) -> dict[str, Value]:
        """Its settings that differ in the part."""
        differing = self.differing(part.name)
        return {key: value for key, value in (part.baseline or self.study.baseline).items() if key in differing}


def read_file(path: Path) -> StudyFile:
    """A study as it is written, without its runs. Raises: ConfigError, one line per mistake."""
    try:
        found = read_toml(path, "study file")
    except FileNotFoundError as error:
        raise ConfigError(f"study file {path} does not exist; give a TOML file with [study] and [[part]]") from error
    if "run" in found and "study" not in found:
        raise ConfigError(f"{path} is the config of a run, not a study; start it with `cusearch launch {path}`")
    try:
        return StudyFile.model_validate(found)
    except ValidationError as error:
        sections: dict[str, type[Section]] = {"": StudyFile, "study": StudySection, "part": Part}
        sections |= {"claim": Claim, "reported": Reported}
        raise ConfigError(explain_study(error, found, sections)) from error


def read_plan(path: Path) -> Plan:
    """Raises: ConfigError that names the part, the combination and the mistake."""
    file = read_file(path)
    names = [part.name for part in file.part]
    if len(set(names)) < len(names):
        raise ConfigError(f"study file {path}: parts must have different names, got {', '.join(names)}")
    for about, name in (
        *((f"claim {claim.text!r}: part", claim.part) for claim in file.claim),
        *((f"part {part.name!r}: beside", part.beside) for part in file.part if part.beside),
    ):
        if name not in names:
            raise ConfigError(f"{about} {name!r} is no part; there are {', '.join(names)}")
    varied = tuple(dict.fromkeys(key for part in file.part for key in (*part.settings, *part.grid)))
    runs: dict[str, PlannedRun] = {}
    for part in file.part:
        for run in _runs_of(part, file):
            shared = runs.setdefault(run.id, run)
            shared.parts.append(part.name)
            shared.written.append(run.settings)
    plan = Plan(file.study, file.part, file.claim, varied, runs)
    _check_baselines(plan)
    for claim in file.claim:
        _check_claim(claim, plan)
    for part in file.part:
        if part.beside:
            _check_beside(part, plan)
    return plan


def _check_baselines(plan: Plan) -> None:
    """Raises: ConfigError for a baseline that is no run of its part."""
    sections = [("study", plan.study.baseline), *((f"part {part.name!r}", part.baseline) for part in plan.parts)]
    for name, baseline in sections:
        missing = [key for key in baseline if key not in plan.varied]
        if missing:
            value_of(next(iter(plan.runs.values())).config, missing[0])
            raise ConfigError(f"{name}: baseline {missing[0]} is the same in all runs; it must differ in some part")
    for part in plan.parts:
        baseline, about = plan.baseline(part), f"part {part.name!r}"
        if not any(has(run, baseline) for run in plan.of(part.name)):
            raise ConfigError(f"{about} has no run with its baseline: {_listed(baseline)}")
        for runs in plan.contexts(part.name, baseline).values():
            _check_questions(about, runs)


def _check_claim(claim: Claim, plan: Plan) -> None:
    """Raises: ConfigError unless each of its sides is one run, for each seed and setting of what it does not name."""
    about = f"claim {claim.text!r}: part {claim.part!r}"
    for key in {*claim.better, *claim.than, *claim.more_where} - {*plan.varied}:
        value_of(next(iter(plan.runs.values())).config, key)
    for name, side in (("better", claim.better), ("than", claim.than), ("more_where", claim.more_where)):
        if not any(has(run, side) for run in plan.of(claim.part)):
            raise ConfigError(f"{about} has no run with its {name}: {_listed(side)}")
    if claim.than and any(has(run, claim.better) and has(run, claim.than) for run in plan.of(claim.part)):
        raise ConfigError(f"{about} compares runs with themselves: better and than name the same")
    for runs in plan.contexts(claim.part, claim.named).values():
        _check_questions(about, runs)
        for half, side in itertools.product(claim.halves(runs), claim.sides):
            seeds = Counter(run.seed for run in half if has(run, side))
            if not seeds:
                raise ConfigError(
                    f"{about} has no run with {_listed(side)} at one value of its other settings: those that a method "
                    "lacks change nothing there; put them into a part without it"
                )
            if max(seeds.values(), default=0) > 1:
                raise ConfigError(
                    f"{about} has several runs of one seed with {_listed(side)}: both sides of a claim must name the "
                    "same settings, and more_where one of two values"
                )
    for one in claim.reported:
        contexts = plan.contexts(claim.part, claim.named).values()
        if not any(has(runs[0], one.where) for runs in contexts) or claim.named & {*one.where}:
            raise ConfigError(f"{about} is tested in no such setting as its reported where: {_listed(one.where)}")


def _check_beside(part: Part, plan: Plan) -> None:
    """Raises: ConfigError unless there are runs beside each of its runs, one each, which are scored on the same
    questions."""
    if several := [key for key in plan.differing(part.beside) if key in part.settings]:
        several_of = f"{several[0]} has several values in beside = {part.beside!r}"
        raise ConfigError(f"part {part.name!r}: {several_of}; name a part in which it has one")
    pairs = plan.pairs(part)
    if not pairs:
        raise ConfigError(f"part {part.name!r}: no run of beside = {part.beside!r} differs in its settings alone")
    for pair in pairs.items():
        _check_questions(f"part {part.name!r}", [plan.runs[name] for name in pair])


def _check_questions(about: str, runs: Sequence[PlannedRun]) -> None:
    """Raises: ConfigError for runs that are scored on other held-out questions."""
    asked = [(run.config.eval, run.config.eval.suite or run.config.sources_of(run.config.evaluated_in)) for run in runs]
    if any(one != asked[0] for one in asked):
        raise ConfigError(f"{about} compares runs that are scored on other held-out questions; they must have the same")


def _listed(settings: dict[str, Value]) -> str:
    return ", ".join(f"{key} = {_text(value)}" for key, value in settings.items())


def grouped(runs: Sequence[PlannedRun], keys: Sequence[str]) -> dict[Context, list[PlannedRun]]:
    found: dict[Context, list[PlannedRun]] = {}
    for run in runs:
        found.setdefault(tuple((key, found_in(run.config, key)) for key in keys), []).append(run)
    return found


def has(run: PlannedRun, settings: dict[str, Value]) -> bool:
    """Whether a run has these values, as its config holds them or as the study file writes them (1e-6 as a text, a path
    with ~)."""
    return all(is_value(run, key, value) for key, value in settings.items())


def is_value(run: PlannedRun, key: str, value: Value) -> bool:
    return any(one.get(key) == value for one in run.written) or plain(found_in(run.config, key)) == value


def plain(value: Any) -> Value:
    """A value of a config as a study file writes it."""
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value if isinstance(value, bool | int | float) else str(value)


def _runs_of(part: Part, file: StudyFile) -> Iterator[PlannedRun]:
    for seed in range(part.seeds):
        for values in itertools.product(*part.grid.values()):
            settings = file.settings | part.settings | dict(zip(part.grid, values, strict=True))
            yield _planned(settings, seed, part, file)


def _planned(settings: dict[str, Value], seed: int, part: Part, file: StudyFile) -> PlannedRun:
    taken = [key for key in settings if key in OF_A_RUN]
    if taken:
        raise ConfigError(f"part {part.name!r}: {taken[0]} is set by the study itself; remove it")
    try:
        config = load_config(list(file.study.configs), overrides_of(settings | {"run.seed": seed}))
    except ConfigError as error:
        given = f", with {_listed(settings)}" if settings else ""
        raise ConfigError(f"part {part.name!r}{given}: {error}") from error
    if not config.eval.in_order:
        raise ConfigError(f"part {part.name!r}: a study needs eval.in_order = true, so that no version is skipped")
    if config.run.steps % config.eval.every:
        raise ConfigError(
            f"part {part.name!r}: run.steps ({config.run.steps}) must be a multiple of eval.every ({config.eval.every})"
        )
    return PlannedRun(_id_of(config), settings, seed, config)


def _id_of(config: Config) -> str:
    """Method, seed, and a checksum of all settings that are not the defaults, so that neither a new part of the study
    nor a new setting of this program makes a run another one."""
    whole = config.model_dump(mode="json", exclude_defaults=True)
    for key in OF_A_RUN:
        section, name = key.split(".")
        whole.get(section, {}).pop(name, None)
    whole = {section: values for section, values in whole.items() if values != {}}  # of nothing but such keys
    digest = xxhash.xxh3_64_hexdigest(json.dumps(whole, sort_keys=True).encode())[:8]
    return f"{config.method.name}-s{config.run.seed}-{digest}"


def value_of(config: Config, key: str) -> Any:
    """The value of a setting, by its dotted key. Raises: ConfigError for an unknown setting."""
    found: Any = config
    try:
        for name in key.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
    except (AttributeError, KeyError) as error:
        raise ConfigError(explain_unknown_setting(key)) from error
    return found


def found_in(config: Config, key: str) -> Any:
    """The same, but None for a setting that this config does not have: those of own methods, for example."""
    try:
        return value_of(config, key)
    except ConfigError:
        return None


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list) else str(value)
