"""Prompts as token ids, with and without a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.engines.chat import Chat
from harness.measuring.prompts.chat_templates import encode_prompts, require_tools
from tiny_checkpoints import make_tokenizer

TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def said(*texts: str) -> Chat:
    """A chat in which user and assistant take turns."""
    return Chat(
        tuple(
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)
        )
    )


def test_plain_prompts() -> None:
    tokenizer = make_tokenizer()
    a, b = tokenizer.get_vocab()["a"], tokenizer.get_vocab()["b"]
    for mode in ("auto", "never"):
        assert encode_prompts(tokenizer, [said("ab"), said("b")], mode) == [[a, b], [b]]


def test_chat_template() -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    a, colon = tokenizer.get_vocab()["a"], tokenizer.get_vocab()[":"]
    for mode in ("auto", "always"):
        assert encode_prompts(tokenizer, [said("a")], mode) == [[0, a, colon]]
    assert encode_prompts(tokenizer, [said("a")], "never") == [[a]]


def test_a_template_has_the_variables_of_the_user() -> None:
    template = "{% if loud %}b{% endif %}{{ messages[0]['content'] }}"
    tokenizer = make_tokenizer(chat_template=template)
    a, b = tokenizer.get_vocab()["a"], tokenizer.get_vocab()["b"]
    assert encode_prompts(tokenizer, [said("a")], "auto") == [[a]]
    assert encode_prompts(tokenizer, [said("a")], "auto", {"loud": True}) == [[b, a]]


def test_a_chat_keeps_its_turns_in_a_template_and_as_text() -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE)
    a, b, colon = (tokenizer.get_vocab()[token] for token in "ab:")
    (templated,) = encode_prompts(tokenizer, [said("a", "b", "a")], "auto")
    assert [token for token in templated if token in (a, b)] == [a, b, a]
    assert templated[-1] == colon
    (text,) = encode_prompts(tokenizer, [said("a", "b", "a")], "never")
    assert tokenizer.decode(text) == "user: a\nassistant: b\nuser: a\nassistant:"


def test_a_chat_without_a_template_is_refused() -> None:
    hint = "2 of 3 prompts are chats of several messages; chat_template=never reads them as text"
    with pytest.raises(
        SettingError, match=rf"^chat_template=auto: this model's tokenizer has none, and {hint}$"
    ):
        encode_prompts(
            make_tokenizer(), [said("a", "b", "a"), said("a"), said("a", "b", "c")], "auto"
        )


def test_a_system_prompt_needs_a_template() -> None:
    """A chat of a system prompt and one message is no chat of several messages to its user."""
    system = {"role": "system", "content": "Be brief."}
    chat = Chat((system, {"role": "user", "content": "a"}))
    with pytest.raises(
        SettingError,
        match="a system message needs a chat template, and this model's tokenizer has none; chat_template=never",
    ):
        encode_prompts(make_tokenizer(), [chat, chat], "auto")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('System role not supported') }}", r"System role not supported"),
        ({"rag": TEMPLATE, "tool_use": TEMPLATE}, r".*no default.*"),
    ],
)
def test_a_template_that_refuses_a_chat(template: Any, reason: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    advice = "chat_template=never reads it as text"
    with pytest.raises(
        SettingError,
        match=rf"^chat_template=auto: this model's template refuses a prompt \({reason}\); {advice}$",
    ):
        encode_prompts(tokenizer, [said("a")], "auto")


def test_template_that_is_not_there() -> None:
    with pytest.raises(
        SettingError, match=r"^chat_template=always: this model's tokenizer has none"
    ):
        encode_prompts(make_tokenizer(), [said("a")], "always")


def test_prompt_without_tokens_is_named() -> None:
    with pytest.raises(SettingError, match=r"^prompts: the prompt '' has no tokens$"):
        encode_prompts(make_tokenizer(), [said("a"), said("")], "auto")


def test_tools_need_a_template_that_shows_them() -> None:
    find = {"type": "function", "function": {"name": "b"}}
    chat = Chat(said("a").messages, (find,))
    shows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    tokenizer = make_tokenizer(chat_template=shows)
    require_tools(tokenizer, [said("a"), chat], "auto")
    [ids] = encode_prompts(tokenizer, [chat], "auto")
    assert ids[0] == tokenizer.get_vocab()["b"]

    problem = "1 of 2 prompts have tools"
    with pytest.raises(
        SettingError, match=f"^prompts: {problem}, and this model's template shows none$"
    ):
        require_tools(make_tokenizer(chat_template=TEMPLATE), [said("a"), chat], "auto")
    with pytest.raises(
        SettingError, match=f"^chat_template=never: {problem}, which only a chat template"
    ):
        require_tools(tokenizer, [said("a"), chat], "never")
    require_tools(make_tokenizer(), [said("a")], "auto")
