"""Chat templates of several habits, for the starter's tokenizer, whose end-of-text token ends a turn."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests.fakes import STARTER

ROOT = Path(__file__).parents[2]
CHAT_STARTER = ROOT / "docs" / "examples" / "chat-starter"
AGENTS_PAGE = ROOT / "docs" / "agents.md"
_TOOLS = "{% if tools %}Tools:{% for t in tools %} {{ t.function.name }}{% endfor %}\n{% endif %}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | "
    "tojson }}</tool_call>{% endfor %}"
)
_ASKS = "{% if add_generation_prompt %}assistant: {% endif %}"
PLAIN = _TOOLS + "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}" + _CALLS + "END\n{% endfor %}" + _ASKS
FORGETS_THOUGHTS = (
    _TOOLS + "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' and loop.index0 > ns.last %}[thought]{% endif %}"
    "{% if m.role == 'assistant' %}{{ (m.content or '').split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}"
    + _CALLS
    + "END\n{% endfor %}"
    + _ASKS
)
"""As Qwen3's: only turns after the last user's message show their thoughts."""
CALLS_ALONE = (
    _TOOLS + "{% for m in messages %}{{ m.role }}: {% if m.tool_calls %}" + _CALLS + "{% else %}{{ m.content or '' }}"
    "{% endif %}END\n{% endfor %}" + _ASKS
)
"""As Mistral's: the text beside tool calls is not shown."""
OWN_SYSTEM_PROMPT = "{% if messages[0].role != 'system' %}system: Be helpful.END\n{% endif %}" + PLAIN
"""As Qwen2.5's."""
TEMPLATES = {
    "plain": PLAIN,
    "forgets thoughts": FORGETS_THOUGHTS,
    "calls alone": CALLS_ALONE,
    "system prompt": OWN_SYSTEM_PROMPT,
}


def chat_tokenizer(template: str = PLAIN) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(STARTER)
    tokenizer.chat_template = template.replace("END", tokenizer.eos_token)
    return tokenizer


def chat_starter(folder: Path) -> Path:
    """The policy of the demo as a chat model, made by the commands of docs/agents.md."""
    (commands,) = re.findall(r"^(mkdir -p runs/chat-starter\n.*?)^cusearch demo", AGENTS_PAGE.read_text(), re.M | re.S)
    subprocess.run(["bash", "-ec", commands.replace("runs/chat-starter", str(folder))], cwd=ROOT, check=True)
    return folder
