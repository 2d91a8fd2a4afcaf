"""Make chats.json: what Hugging Face transformers renders of conversations by templates of the families.

Run from the repository's root, in an environment of its own; DEMO is the demo model's GGUF file:

    python3 -m venv /tmp/golden && /tmp/golden/bin/pip install transformers==5.24.0 jinja2==3.1.6 gguf==0.19.0
    /tmp/golden/bin/python -m tests.golden.make_chats DEMO
"""

import json
import sys
from pathlib import Path

import gguf
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from tests.golden.chats import (
    BOS,
    CONVERSATIONS,
    EOS,
    GOLDEN_CHATS,
    TEMPLATES,
    Conversation,
    conversations_for,
    template_names,
)


def rendered(source: str, chat: Conversation) -> dict[str, str]:
    """Render one conversation."""
    try:
        texts, _ = render_jinja_template(
            [chat.messages],
            tools=chat.function_tools,
            chat_template=source,
            add_generation_prompt=chat.add_generation_prompt,
            bos_token=BOS,
            eos_token=EOS,
            **chat.variables,
        )
    except TemplateError as error:
        return {"error": str(error)}
    return {"text": texts[0]}


def main() -> None:
    """Render everything."""
    golden = {}
    for name in template_names():
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        golden[name] = {case: rendered(source, chat) for case, chat in conversations_for(name).items()}
    field = gguf.GGUFReader(Path(sys.argv[1])).get_field("tokenizer.chat_template")
    golden["smollm2"] = {
        case: rendered(field.contents(), chat)
        for case, chat in CONVERSATIONS.items()
        if not (chat.tools or chat.variables or any("tool_calls" in m for m in chat.messages))
    }
    GOLDEN_CHATS.write_text(json.dumps(golden, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
