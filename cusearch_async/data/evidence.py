"""The passages that a question's answer takes, in the forms in which benchmarks name them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cusearch_async.data.literals import read_literal
from cusearch_async.errors import ConfigError


def evidence_of(values: Mapping[str, Any], where: str) -> tuple[str, ...] | None:
    """Texts, with a quoted title line where a title is known; None where the row does not name them all.

    `values` by folded names. Raises: ConfigError for `evidence_docs` of another form."""
    documents = read_literal(values.get("evidence_docs"))
    if documents is not None:
        return _of_documents(documents, where)
    holders = (values, *(read_literal(values.get(name)) for name in ("metadata", "extra_info")))
    found = (_of_paragraphs(holder) or _of_facts(holder) for holder in holders if isinstance(holder, dict))
    return next((texts for texts in found if texts), None)


def _of_documents(documents: Any, where: str) -> tuple[str, ...]:
    """BrowseComp-Plus: [{"text": ...}]."""
    listed = documents if isinstance(documents, list) else [None]
    texts = [document.get("text") if isinstance(document, dict) else None for document in listed]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{where}: 'evidence_docs' must be a list of {{'text': ...}}, got {documents!r:.200}")
    return tuple(map(str, texts))


def _of_paragraphs(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """MuSiQue: `paragraphs` [{"title", "paragraph_text", "is_supporting"}]."""
    paragraphs = read_literal(values.get("paragraphs"))
    if not isinstance(paragraphs, list):
        return None
    texts = [
        (one.get("title"), one.get("paragraph_text") or one.get("text"))
        for one in paragraphs
        if isinstance(one, dict) and one.get("is_supporting") in (True, "true", "True")
    ]
    return _titled(texts)


def _of_facts(values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """HotpotQA and 2WikiMultihopQA: `supporting_facts` [[title, sentence]] and `context` [[title, sentences]]; on the
    Hub {"title": [...], "sent_id": [...]} and {"title": [...], "sentences": [...]}."""
    facts, context = (read_literal(values.get(name)) for name in ("supporting_facts", "context"))
    try:
        if isinstance(facts, dict):
            facts = [[title] for title in facts["title"]]
        if isinstance(context, dict):
            sentences = context["sentences"] if "sentences" in context else context["content"]
            context = zip(context["title"], sentences, strict=True)
        texts = {str(title): _joined(said) for title, said in context}
        titles = dict.fromkeys(str(fact[0]) for fact in facts)
    except (TypeError, ValueError, LookupError):  # of another form
        return None
    return _titled([(title, texts.get(title)) for title in titles])


def _joined(sentences: Any) -> str:
    """A paragraph of its sentences; a text is one already."""
    return sentences if isinstance(sentences, str) else " ".join(str(sentence).strip() for sentence in sentences)


def _titled(texts: list[tuple[Any, Any]]) -> tuple[str, ...] | None:
    """None without any, or where one is missing: recall over the others would say too much."""
    if not texts or not all(isinstance(text, str) and text.strip() for _, text in texts):
        return None
    return tuple(f'"{title}"\n{text}' if title else text for title, text in texts)
