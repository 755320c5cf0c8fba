"""Prompts as the model reads them: plain text, or chat messages through its own template."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from oapl.config import TaskConfig
from oapl.errors import ModelError
from oapl.model import encode_prompt

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '/' if m.role == 'system' else '*' }}{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ '=' if shout else '-' }}{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    """Of the tiny model, whose tokens are characters, with a template that marks who speaks."""
    made = AutoTokenizer.from_pretrained(tiny_model)
    made.chat_template = TEMPLATE
    return made


def text(tokenizer: PreTrainedTokenizerBase, prompt: object, **task: object) -> str:
    return tokenizer.decode(encode_prompt(tokenizer, prompt, TaskConfig(name="countdown", **task)))


def test_plain_text_is_read_as_it_stands(tokenizer):
    assert text(tokenizer, "1+2") == "1+2"


def test_a_task_can_put_plain_text_into_a_chat(tokenizer):
    assert text(tokenizer, "1+2", chat=True) == "*1+2\n-"
    assert text(tokenizer, "1+2", system_prompt="12") == "/12\n*1+2\n-"
    assert text(tokenizer, "1+2", chat=True, chat_template_kwargs={"shout": True}) == "*1+2\n="


def test_messages_are_read_by_the_template(tokenizer):
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert text(tokenizer, messages) == "*1\n*2\n-"
    assert text(tokenizer, messages, system_prompt="3") == "/3\n*1\n*2\n-"


def test_what_cannot_be_a_chat_is_refused(tokenizer, tiny_model: Path):
    with pytest.raises(ModelError, match="bring a system message of their own"):
        text(tokenizer, [{"role": "system", "content": "1"}], system_prompt="2")
    with pytest.raises(ModelError, match="chat template refuses a prompt's messages: no tools"):
        text(tokenizer, [{"role": "tool", "content": "1"}])
    plain = AutoTokenizer.from_pretrained(tiny_model)
    with pytest.raises(ModelError, match="has no chat template"):
        text(plain, "1+2", chat=True)
