"""Token by token, for any history: the tape holds what the policy was given and sampled, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from cusearch_async.agents.conversation import Conversation, Message, ToolCall, end_of_turn, special_tokens
from cusearch_async.errors import EpisodeFailed
from tests.agents.templates import CALLS_ALONE, FORGETS_THOUGHTS, PLAIN, TEMPLATES, chat_tokenizer

TOOLS = [{"type": "function", "function": {"name": "search"}}]
TOKENIZERS = {name: chat_tokenizer(template) for name, template in TEMPLATES.items()}
END = TOKENIZERS["plain"].eos_token
PIECES = st.sampled_from([*"ab <>{}\n\"'é", END, "</think>", "<search>"])
TEXT = st.lists(PIECES, min_size=1, max_size=12).map("".join)


def call(query: str, number: int = 0) -> ToolCall:
    return ToolCall(f"call_{number}", "search", json.dumps({"query": query}))


TURN = st.builds(
    Message,
    st.just("assistant"),
    TEXT.filter(lambda text: END not in text),
    st.lists(st.builds(call, st.text("abé ", max_size=5), st.integers(0, 9)), max_size=2).map(tuple),
)
NEXT = st.lists(st.builds(Message, st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=3)


def written_again(turn: Message, how: int) -> Message:
    """As clients do: other spaces around the text and in the JSON."""
    calls = (replace(c, arguments=json.dumps(c.parsed, indent=how % 3 or None)) for c in turn.tool_calls)
    return replace(turn, content=["", " ", "\n"][how % 3] + turn.content, tool_calls=tuple(calls))


def literally(message: Message) -> str:
    """What the plain template writes for a message that is no turn of the policy."""
    return f"{message.role}: {message.content}{END}\n"


@given(
    st.sampled_from(sorted(TEMPLATES)),
    NEXT,
    st.lists(st.tuples(TURN, st.booleans(), NEXT), max_size=4),
    st.integers(0, 8),
)
def test_each_request_appends_just_what_is_new(name, first, rounds, how):
    """The oracle writes it down by hand: every new message, and the beginning of the turn."""
    tokenizer = TOKENIZERS[name]
    conversation = Conversation(tokenizer, {}, END)
    messages, given_ids = tuple(first), conversation.following(first, TOOLS)
    asks = "assistant: "
    own = literally(Message("system", "Be helpful.")) if name == "system prompt" else ""
    expected = own + "Tools: search" + "".join(map(literally, first)) + asks
    assert tokenizer.decode(given_ids) == expected
    for turn, is_open, new in rounds:
        conversation.add(messages, TOOLS, turn, None if is_open else END)
        messages = (*messages, written_again(turn, how), *new)
        assert conversation.changed(messages, TOOLS) == ""
        given_ids = conversation.following(messages, TOOLS)
        expected = (END if is_open else "") + "\n" + "".join(map(literally, new)) + asks
        assert tokenizer.decode(given_ids) == expected
        ends = sum(token == tokenizer.eos_token_id for token in given_ids)
        assert ends == len(new) + is_open, "a special token in a text stays text"


@pytest.mark.parametrize("query", [f"x {END} y", f'"x\\ {END}\n é', "x"])
def test_a_special_token_in_an_earlier_call_stays_text(query):
    """A new row may have calls in its history. Before, the policy saw a turn that ended within the call."""
    tokenizer, calls = TOKENIZERS["plain"], (call(query), call("é"))
    messages = [Message("user", "?"), Message("assistant", "", calls), Message("tool", "5")]
    ids = Conversation(tokenizer, {}, END).following(messages, TOOLS)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        [message.for_template() for message in messages], tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert sum(token == tokenizer.eos_token_id for token in ids) == 3


@given(NEXT, TURN, NEXT, st.data())
def test_a_changed_history_is_noticed(first, turn, new, data):
    conversation = Conversation(TOKENIZERS["plain"], {}, END)
    conversation.add(tuple(first), TOOLS, turn, ended=END)
    history = [*first, turn, *new]
    place = data.draw(st.integers(0, len(first)))
    changed = data.draw(
        st.sampled_from(
            [
                replace(history[place], content=history[place].content + "x"),
                replace(history[place], role="system"),
                replace(history[place], tool_call_id="call_9"),
                replace(history[place], tool_calls=(*history[place].tool_calls, call("x"))),
            ]
        )
    )
    assert f"message {place} " in conversation.changed([*history[:place], changed, *history[place + 1 :]], TOOLS)
    assert "not those of the request before" in conversation.changed(history, [])
    assert "messages came after" in conversation.changed(history[: len(first) + 1], TOOLS)
    assert "that the policy has not written" in conversation.changed([*history, turn], TOOLS)


@pytest.mark.parametrize(("said", "given"), [("<think>hm</think>\n5", "5"), ("hm</think>5", " 5\n")])
def test_a_turn_is_known_without_its_thoughts(said, given):
    turn = Message("assistant", said)
    assert turn.says(Message("assistant", given))
    assert not turn.says(Message("assistant", "6"))
    assert not Message("assistant", given).says(turn), "the policy has thought nothing"


def test_a_template_that_writes_a_turn_in_another_way_is_refused():
    """It numbers the messages from behind."""
    template = PLAIN.replace("{{ m.role }}: ", "{{ m.role }} {{ loop.revindex }}: ").replace(
        "{{ m.content or '' }}", ""
    )
    conversation = Conversation(chat_tokenizer(template), {}, END)
    conversation.add((Message("user", "a"),), (), Message("assistant", "b"), ended=END)
    messages = [Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    with pytest.raises(EpisodeFailed, match="writes a turn in another way"):
        conversation.following(messages, ())


def test_the_templates_have_the_habits_that_are_tested():
    """Rendered anew, the second request would not begin with the first and its turn."""
    turn = Message("assistant", "<think>x</think>So", (call("a"),)).for_template()
    asked, more = {"role": "user", "content": "?"}, {"role": "user", "content": "!"}
    for template in (FORGETS_THOUGHTS, CALLS_ALONE):
        tokenizer = chat_tokenizer(template)
        before = tokenizer.apply_chat_template([asked], tokenize=False, add_generation_prompt=True)
        again = tokenizer.apply_chat_template([asked, turn, more], tokenize=False)
        assert not again.startswith(before + "<think>x</think>So")


def test_a_turn_may_end_with_a_special_token_without_a_role():
    """As Gemma's <end_of_turn>; `all_special_tokens` has only those with a role."""
    tokenizer = chat_tokenizer(
        "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>assistant\n{% endif %}"
    )
    tokenizer.add_tokens([AddedToken(name, special=True) for name in ("<start_of_turn>", "<end_of_turn>")])
    assert "<end_of_turn>" not in tokenizer.all_special_tokens
    assert end_of_turn(tokenizer, {}) == "<end_of_turn>"
    assert "<end_of_turn>" in special_tokens(tokenizer)


def test_what_a_template_writes_only_behind_the_last_turn_is_not_its_end():
    """As Phi-4-mini's <|endoftext|>."""
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% else %}END{% endif %}"
    )
    tokenizer.add_tokens([AddedToken("<|end|>", special=True)])
    end = end_of_turn(tokenizer, {})
    assert end == "<|end|>"
    conversation = Conversation(tokenizer, {}, end)
    asked = (Message("user", "Where?"),)
    conversation.following(asked, ())
    conversation.add(asked, (), Message("assistant", "There."), ended=end)
    given = conversation.following((*asked, Message("assistant", "There."), Message("user", "And?")), ())
    assert tokenizer.decode(given) == "user: And?<|end|>assistant: "


GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}"
    "{% else %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }}]"
    "{% endfor %}<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "end", "ended", "after"),
    [
        (GLM, "", "<|observation|>", "5<|assistant|>"),
        (LLAMA, "<|eot|>", "<|eom|>", "<|tool|>5<|eot|><|assistant|>"),
        (LLAMA, "<|eot|>", "<|eot|>", "<|tool|>5<|eot|><|assistant|>"),
        (LLAMA, "<|eot|>", None, "<|eot|><|tool|>5<|eot|><|assistant|>"),
    ],
)
def test_a_turn_has_one_end(template, end, ended, after):
    """GLM ends a call with the token that opens the result, Llama 3.1 with another than its template writes: every
    later turn was sampled behind two of them."""
    tokenizer = chat_tokenizer(template)
    names = ("observation", "user", "assistant", "tool", "eot", "eom")
    tokenizer.add_tokens([AddedToken(f"<|{name}|>", special=True) for name in names])
    assert end_of_turn(tokenizer, {}) == end
    conversation = Conversation(tokenizer, {}, end)
    asked, turn = (Message("user", "Where?"),), Message("assistant", "", (call("x"),))
    conversation.add(asked, TOOLS, turn, ended)
    given = conversation.following((*asked, turn, Message("tool", "5")), TOOLS)
    assert tokenizer.decode(given) == after
