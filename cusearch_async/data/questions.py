"""Questions and passages by the names that the config gives them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from cusearch_async.algorithm.tickets import RunQuestions
from cusearch_async.atlas import prose
from cusearch_async.atlas.facts import load_facts
from cusearch_async.atlas.questions import WORLDS, World, test_chains, train_questions
from cusearch_async.config import EMBEDDED, Config, EvalConfig
from cusearch_async.data.columns import shown
from cusearch_async.data.files import HUB, locate, read_rows
from cusearch_async.data.rows import SCORED_0, Origin, can_be_answered, origin_of, parse_row
from cusearch_async.errors import ConfigError, RetrievalUnavailable
from cusearch_async.retrieval.backend import Passage
from cusearch_async.retrieval.corpus import Corpus
from cusearch_async.streams import Stream, stream
from cusearch_async.types import Question

log = logging.getLogger(__name__)

BESIDE_SCORES = frozenset({"step", "epoch", "seconds", "each"})
"""What else a row of eval.jsonl has."""
SUITE = {
    "nq": ("nq/test.jsonl", 3610),
    "triviaqa": ("triviaqa/test.jsonl", 11313),
    "popqa": ("popqa/test.jsonl", 14267),
    "hotpotqa": ("hotpotqa/dev.jsonl", 7405),
    "2wikimultihopqa": ("2wikimultihopqa/dev.jsonl", 12576),
    "musique": ("musique/dev.jsonl", 2417),
    "bamboogle": ("bamboogle/test.jsonl", 125),
}
"""The seven benchmarks: file in FlashRAG's collection, and questions in it."""


def load_questions(sources: Sequence[str], asked_by: str = "data.source", needs_answers: bool = True) -> list[Question]:
    """Training questions of all `sources`: one of WORLDS, a file (see data/files.py), or hf:OWNER/NAME/FILE. Errors
    name what they are `asked_by`. `needs_answers`: whether each must have gold answers.

    Raises: ConfigError naming the file, the row and the field, or two questions of one id."""
    origins = zip(sources, origins_of(sources), strict=True)
    found = [_questions_of(source, asked_by, origin, needs_answers) for source, origin in origins]
    questions = _unique([*itertools.chain(*found)])
    unanswerable = [f"{one.id:.80}" for one in questions if one.answers and not can_be_answered(one)]
    if without := [f"{one.id:.80}" for one in questions if not one.answers]:
        named = shown(without, 3)
        log.warning("%d of %d questions have no gold answers: %s (%s)", len(without), len(questions), SCORED_0, named)
    if unanswerable:
        log.warning(
            "%d of %d questions can never be scored correct: their gold answers are empty after normalisation (%s)",
            *(len(unanswerable), len(questions), shown(unanswerable, 3)),
        )
    return questions


def needs_answers(config: Config, label: str, held_out: bool = False) -> bool:
    """Whether the questions of an environment must have gold answers: for its reward, for a simulated engine, or if
    they are held out, for a judge."""
    if held_out and config.eval.judge.url is not None:
        return True
    environment = config.environment[label]
    is_simulated = config.retriever.backend == "zerosearch" and label in config.searching
    return is_simulated or (environment.kind.needs_answers and environment.reward is None)


def load_run_questions(config: Config) -> RunQuestions:
    """The questions of every environment, each with its label; where there are several, ids begin with it.

    Raises: ConfigError."""
    parts = []
    for label, settings in config.environment.items():
        sources = config.sources_of(label)
        needed = needs_answers(config, label)
        named = source_key(config, label)
        questions = load_questions(sources, named, needed) if sources else _own_questions(config, label)
        prefix = f"{label}:" if len(config.environment) > 1 else ""
        if prefix:
            questions = [replace(question, id=prefix + question.id) for question in questions]
        parts.append((settings.share, _unique(labelled(questions, label))))
    return RunQuestions(parts, config.run.seed)


def source_key(config: Config, label: str) -> str:
    """The setting that names an environment's questions."""
    return f"environment.{label}.source" if config.environment[label].source else "data.source"


def first_question(config: Config, label: str) -> Question:
    """Of an environment, without reading the others. Raises: ConfigError."""
    sources = config.sources_of(label)
    if sources:
        named = source_key(config, label)
        return next(_questions_of(sources[0], named, origins_of(sources)[0], needs_answers(config, label)))
    return _own_questions(config, label)[0]


def _own_questions(config: Config, label: str) -> list[Question]:
    """Those that an environment brings. Raises: ConfigError."""
    kind, needed = config.environment[label].kind, needs_answers(config, label)
    found = list(kind.questions() or ())
    if not found:
        raise ConfigError(f"environment.{label}: {config.environment[label].name} has no questions; set its source")
    for one in found:
        is_whole = isinstance(one, Question) and isinstance(one.answers, tuple)
        if not (is_whole and all(isinstance(text, str) for text in (one.id, one.text, *one.answers))):
            about = f"{kind.__module__}:{kind.__qualname__}.questions()"
            raise ConfigError(f"{about} must give Questions with texts as id, text and answers, got {one!r:.200}")
        if not one.answers and needed:
            why = "which its reward, or the simulated engine, needs"
            raise ConfigError(f"environment.{label}: its question {one.id!r:.80} has no gold answers, {why}")
    return found


def load_eval_questions(config: Config) -> list[Question]:
    """Held-out questions, for the environment that the config names: of the benchmarks of eval.suite, of each a fixed
    subset of eval.limit; else of atlas's test cities. Raises: ConfigError."""
    needed = needs_answers(config, config.evaluated_in, held_out=True)
    held_out = _of_suite(config.eval, needed) if config.eval.suite else _of_world(config.eval, held_out_world(config))
    return labelled(held_out, config.evaluated_in)


def labelled(questions: Sequence[Question], environment: str) -> list[Question]:
    """The questions, with the label of an environment."""
    return [
        question if question.environment == environment else replace(question, environment=environment)
        for question in questions
    ]


def _of_world(settings: EvalConfig, world: World | None) -> list[Question]:
    if world is None:
        raise ConfigError(
            f"eval.suite must name benchmarks ({', '.join(SUITE)}), or files; only an environment whose questions "
            f"are those of {' or '.join(map(repr, WORLDS))} comes with held-out questions"
        )
    try:
        return [chain.question() for chain in test_chains(settings.questions_per_category, world)]
    except ValueError as error:
        raise ConfigError(f"eval.questions_per_category {error}") from error


def _of_suite(settings: EvalConfig, needs_answers: bool) -> list[Question]:
    questions: list[Question] = []
    for name, origin in zip(settings.suite, origins_of(settings.suite), strict=True):
        if name not in SUITE and not Path(name).suffix:
            known = f"{', '.join(SUITE)}, or .parquet or .jsonl files"
            raise ConfigError(f"eval.suite: {name!r} is not a benchmark; use {known}")
        found = _unique([*_questions_of(file_of(name, settings.folder), "eval.suite", origin, needs_answers)])
        if settings.limit is not None and settings.limit < len(found):
            # the same ones in every run, in their order, so that seeds can be compared
            chosen = stream(Stream.EVALUATED, 0).choice(len(found), size=settings.limit, replace=False)
            found = [found[i] for i in sorted(chosen.tolist())]
        questions += found
    names = {question.category for question in questions}
    if taken := sorted(names & BESIDE_SCORES):
        raise ConfigError(f"eval.suite has questions of the source {taken[0]!r}, a column of eval.jsonl; rename it")
    if "all" in names and len(names) > 1:
        raise ConfigError("eval.suite has questions of the source 'all', the name of all sources together; rename it")
    return _unique(questions)


def asks_of_atlas(config: Config) -> bool:
    """Whether an environment's questions are those of an embedded world."""
    return any(source in WORLDS for label in config.environment for source in config.sources_of(label))


def refuse_another_world(config: Config) -> None:
    """Before our retriever is started unasked. Raises: RetrievalUnavailable."""
    if searches_another_world(config):
        corpus, url = config.retriever.corpus, config.retriever.url
        raise RetrievalUnavailable(
            f"our retriever would search the embedded world {corpus}, and no question is of it: start your server at "
            f"retriever.url {url} first, or set retriever.corpus to your passages; for agents that do not search set "
            "environment.LABEL.searches = false; if that world is meant, start it yourself (`cusearch worker retriever "
            "CONFIG`)"
        )


def searches_another_world(config: Config) -> bool:
    """Whether our retriever would search the passages of an embedded world, and no question is of one."""
    is_embedded = config.retriever.has_corpus and config.retriever.corpus in EMBEDDED
    others = any(map(config.sources_of, config.searching))  # none that an environment brings: it knows what it searches
    return is_embedded and others and not asks_of_atlas(config)


def has_held_out(config: Config) -> bool:
    """Whether there are held-out questions, or at least a place where they should be."""
    return bool(config.eval.suite) or held_out_world(config) is not None


def held_out_world(config: Config) -> World | None:
    """The embedded world whose held-out questions are the run's; None where its questions are others."""
    sources = config.sources_of(config.evaluated_in)
    return WORLDS.get(sources[0]) if len(sources) == 1 else None


def load_corpus(corpus: str) -> Sequence[Passage]:
    """Passages: `atlas`, `atlas-prose`, or those of a file (see retrieval/corpus.py).

    Raises: ConfigError naming the file, the line and the field."""
    embedded = {"atlas": lambda: load_facts().passages(), "atlas-prose": prose.passages}
    return embedded[corpus]() if corpus in embedded else Corpus(Path(corpus))


def file_of(name: str, folder: str) -> str:
    """The source of a benchmark's questions; a name that is no benchmark is a file itself."""
    return f"{folder}/{SUITE[name][0]}" if name in SUITE else name


def origins_of(sources: Sequence[str]) -> list[Origin]:
    """What the rows of each source are named after; two files of one name by their folders, too."""
    origins = [Origin(source) if source in SUITE else origin_of(source) for source in sources]
    folders = [Path(source.removeprefix(HUB)).parent for source in sources]
    return [
        origin if origins.count(origin) == 1 else replace(origin, source=f"{above}/{origin.source}")
        for origin, folder in zip(origins, folders, strict=True)
        for above in [folder.parent.name if folder.name == origin.source else folder.name]
    ]


def _questions_of(source: str, key: str, origin: Origin, needs_answers: bool) -> Iterator[Question]:
    if source in WORLDS:
        yield from train_questions(WORLDS[source])
        return
    number = -1
    for number, row in enumerate(read_rows(locate(source, key), key)):
        yield parse_row(row, origin, number, needs_answers)
    if number < 0:
        raise ConfigError(f"{key} {source} holds no questions")


def _unique(questions: list[Question]) -> list[Question]:
    """Raises: ConfigError when two have one id: they would be one group."""
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            made = "which is made of data_source, extra_info.split and extra_info.index (or id)"
            remedy = "give each question its own id, or each file its own data_source"
            raise ConfigError(f"two questions have the id {question.id!r}, {made}; {remedy}")
        seen.add(question.id)
    return questions
