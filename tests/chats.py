"""Chat templates in the style of published ones, with a tokenizer and conversations."""

import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}
        {{- '\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- elif messages and messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}
            {%- if message.content is defined %}{{ message.content }}{% endif %}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' }}
                {{- call.function | tojson }}
                {{- '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>\n' }}
        {%- endgeneration %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA = """
{{- bos_token }}
{%- set found = namespace(system='') %}
{%- for message in messages if message['role'] == 'system' %}
    {%- set found.system = message['content'] | trim %}
    {%- break %}
{%- endfor %}
{%- if found.system %}
    {{- '<|start_header_id|>system<|end_header_id|>\n\n' + found.system + '<|eot_id|>' }}
{%- endif %}
{%- macro turn(message) %}
    {%- if message['content'] is string %}{{ message['content'] | trim }}{% else %}{{ message.tool_calls | tojson }}{% endif %}
{%- endmacro %}
{%- for message in messages if message['role'] != 'system' %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {%- if message['role'] == 'assistant' %}
{% generation %}{{ turn(message) }}<|eot_id|>{% endgeneration %}
    {%- else %}
        {{- turn(message) }}<|eot_id|>
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """
{{- bos_token }}
{%- set system = messages[0]['content'] + '\n\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.index0 < 2 else '') + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'tool' %}
        {{- '[TOOL_RESULTS]' + {'content': message.content} | tojson + '[/TOOL_RESULTS]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation -%}
            {{- ' ' + message['content'] if message['content'] is string else '[TOOL_CALLS]' + message.tool_calls | tojson }}
            {{- eos_token }}
        {%- endgeneration %}
    {%- elif message['role'] != 'system' %}
        {{- raise_exception('only system, user, assistant and tool roles') }}
    {%- endif %}
{%- endfor %}
"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL}
SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<s>",
    "</s>",
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <a> & b's", "parameters": {"type": "object"}}}]


def without_marks(template: str) -> str:
    return re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", template)


def message(role: str, content: str | None, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def conversations() -> list[dict[str, Any]]:
    """Returns records with several turns, a system message, tool calls and characters of several bytes."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<ü>"}}}
    plain = [message("user", "Hello <|you|>,  two "), message("assistant", "  Hi, I am naïve. 🙂")]
    more = [message("user", "What is 1 + 1?"), message("assistant", "It is 2.\n\nSure?")]
    tools = [
        message("assistant", None, tool_calls=[call]),
        message("tool", '{"sum": 2}', name="add"),
        message("assistant", "Two — 二."),
    ]
    return [
        {"messages": plain},
        {"messages": [message("system", "Be brief."), *plain, *more]},
        {"messages": [message("system", "Use tools."), message("user", "Add ü."), *tools], "tools": TOOLS},
        {"messages": [*plain, *more, message("user", "And?")]},
    ]


def save_tokenizer(folder: Path, template: str | None = None, *, adds_bos: bool = False) -> Path:
    """Trains a byte-level BPE on the conversations and saves it in a folder, with the template. Returns its path."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [one["content"] or "" for record in conversations() for one in record["messages"]]
    tokenizer.train_from_iterator([*texts, "assistant user system tool # Tools [INST] [/INST]"] * 3, trainer)
    folder.mkdir(exist_ok=True)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))])
    tokenizer.save(str(folder / "tokenizer.json"))
    eos = {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False, "rstrip": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder / "tokenizer.json"
