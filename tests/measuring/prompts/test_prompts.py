"""Prompt files in every form, every way in which one can be wrong, and the two sets that ship with the project."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.errors import SettingError
from harness.config.settings import PromptSettings
from harness.measuring.prompts.sets import Occurrence, PromptSet, load_prompts

Load = Callable[..., PromptSet]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Writes bytes, text or rows (one JSON object a line) into a file of the given name and loads it."""

    def write_and_load(
        content: bytes | str | list[object], name: str = "mine.jsonl", **settings: object
    ) -> PromptSet:
        if isinstance(content, list):
            content = "\n".join(json.dumps(row) for row in content)
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_prompts(PromptSettings(name="mine", file=str(path), **settings))

    return write_and_load


def texts(prompt_set: PromptSet) -> list[str]:
    return [prompt.text for prompt in prompt_set.prompts]


ASKED = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("row", "unsent"),
    [
        ({"question": "a", "context": "b"}, ()),
        ({"prompt": "a", "context": "b", "input": ""}, ("context",)),
        ({"question": "a", "image": "b.png", "max_tokens": 8}, ("image", "max_tokens")),
        ({"prompt": "a", "system": "b"}, ("system",)),
        ({"prompt": "a", "output_tokens": 5, "n_predict": 5, "max_new_tokens": 5, "temp": 1},
            ("max_new_tokens", "output_tokens", "n_predict", "temp")),
        ({"question": ["a", "c"], "context": "b"}, ("context",)),
        ({"question": "a", "choices": ["b"], "passage": "c", "images": []}, ("passage", "choices")),
        ({"turns": ["a"], "system_prompt": "b"}, ("system_prompt",)),
        ({"conversations": [{"from": "system", "value": "b"}, {"from": "human", "value": "a"}]}, ("system",)),
        ({"max_tokens": 8, "system": "b", "messages": [ASKED]}, ("max_tokens",)),
        ({"max_tokens": 8, "messages": [ASKED, {"role": "assistant", "content": "{"}]},
            ("max_tokens", "the beginning of the answer")),
    ],
)  # fmt: skip
def test_parts_of_a_row_that_are_not_sent_are_known(
    load: Load, row: object, unsent: tuple[str, ...]
) -> None:
    assert load([row]).prompts[0].unsent == unsent


def test_columns_that_the_user_names_are_sent(load: Load) -> None:
    row = {"context": "a", "article": "b", "choices": "c", "input": None}
    named = load([row], columns={"prompt": "article", "category": "choices"}).prompts[0]
    assert (named.text, named.category, named.unsent) == ("b", "c", ("context",))
    joined = load([row], template="{context} {article}{input}").prompts[0]
    assert (joined.text, joined.unsent) == ("a b", ("choices",))
    # Of two arms one row for each prompt is read, and of one server all.
    both = [{"prompt": "a", "arm": arm} for arm in ("speculative", "regular")]
    assert len(load(both).prompts) == len(load(both[:1]).prompts) == 1


FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def test_a_conversation_keeps_its_tools_and_ends_with_the_last_result(load: Load) -> None:
    call = {"type": "function", "function": {"name": "find", "arguments": {"path": "é"}}}
    parts = [{"type": "text", "text": text} for text in ("Where", " is it?")]
    thought = {"content": None, "reasoning": "Look."}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", **thought, "tool_calls": [{"id": "c1", **call}]},
        {"role": "tool", "content": "", "tool_call_id": "c1", "index": 3},
        # A blank text before a call, and a command that prints a line break alone.
        {"role": "assistant", "content": "\n\n", "tool_calls": [{"id": "c2", **call}]},
        {"role": "tool", "content": "\n", "tool_call_id": "c2"},
        {"role": "assistant", "content": "Nowhere."},
    ]
    prompt = load([{"messages": messages, "tools": json.dumps([FIND])}]).prompts[0]
    chat = prompt.chat()
    assert chat.tools == (FIND,)
    assert [message["role"] for message in chat.messages] == ["user", *2 * ["assistant", "tool"]]
    contents = [message["content"] for message in chat.messages]
    assert contents == ["Where is it?", "", "", "\n\n", "\n"]
    assert prompt.following == (messages[5],)
    assert (prompt.opening.messages, prompt.has_answers) == (chat.messages[:1], True)
    called = chat.messages[1]
    assert called["reasoning_content"] == "Look."
    # A server takes arguments as text, a template as an object.
    assert called["tool_calls"][0]["function"]["arguments"] == '{"path": "é"}'
    [for_template] = chat.for_template()[1]["tool_calls"]
    assert for_template["function"] == {"name": "find", "arguments": {"path": "é"}}
    digests = {load([{"messages": messages, "tools": tools}]).digest for tools in ([], "", [FIND])}
    assert len(digests) == 2
    told = load([{"conversations": [{"from": "human", "value": "Where?"}], "tools": [FIND]}])
    assert told.prompts[0].chat().tools == (FIND,)


def test_digest_tells_contents_and_not_formats(load: Load) -> None:
    as_text = load("One\nTwo\n", "mine.txt").digest
    assert len(as_text) == 12
    assert load([{"prompt": "One", "category": "x"}, {"turns": ["Two", "more"]}]).digest == as_text
    assert load("One\r\n\r\nTwo", "mine.txt").digest == as_text
    for other in ("Two\nOne\n", "One\n", "One\nTwo \n", "OneTwo\n"):
        assert load(other, "mine.txt").digest != as_text


def test_take_goes_through_the_categories_in_turn(load: Load) -> None:
    places = [(kind, n) for kind in "abc" for n in range(kind == "b" or 4)]
    loaded = load([{"prompt": f"{kind}{n}", "category": kind} for kind, n in places])
    assert [prompt.text for prompt in loaded.take(6)] == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert [prompt.index for prompt in loaded.take(6)] == [0, 4, 5, 1, 6, 2], "places in the file"
    assert loaded.take(3) == loaded.take(6)[:3]
    assert sorted(prompt.text for prompt in loaded.take(9)) == sorted(texts(loaded))


def with_tool(tools: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], "tools": tools}).encode()


def called(call: object) -> bytes:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
    return json.dumps({"messages": messages}).encode()


def with_arguments(arguments: str) -> bytes:
    return called({"function": {"name": "find", "arguments": arguments}})


def saying(role: str, content: object) -> bytes:
    return json.dumps({"messages": [{"role": role, "content": content}]}).encode()


REFUSED = {
    "absent key": (b'{"prompt": "a"}\n\n{"label": "b", "text": "a long one", "id": 2}',
                   r"line 3 has none of prompt, turns, messages, .*it has label, text, id; 'prompts.columns={"),
    "not JSON": (b'{"prompt": "a"}\n\n{"prompt": "b"\n', r"line 3 is not JSON"),
    "a number": (b"7", "line 1 must be an object"),
    "prompt is a number": (b'{"prompt": 7}', "must have text as prompt"),
    "context is a list": (b'{"instruction": "a", "context": [1]}', "as input or context"),
    "a turn that was read": (b'{"prompt": "b", "turn": "2", "prompt_index": "8"}', "is one turn of a conversation"),
    "no turns": (b'{"turns": "a"}', "a list of texts as turns"),
    "turn is an object": (b'{"turns": [{"a": 1}]}', "text as every one of turns"),
    "no role": (b'{"messages": [{"content": "a"}]}', "objects with role and content"),
    "no content": (b'{"messages": [{"role": "user"}]}', "text as every content"),
    "tools is a number": (with_tool(7), "a list of functions as tools"),
    "tool without a name": (with_tool([{"function": {}}]), "tool 1 without the name"),
    "tools that are no JSON": (with_tool("[{]"), "tools that are not JSON"),
    "call without a name": (called({"function": {"arguments": "{}"}}), "tool call in message 2"),
    "arguments that are no JSON": (with_arguments("{path"), "arguments of find in message 2 that are not JSON"),
    "arguments that are a list": (with_arguments("[1]"), "are no JSON object"),
    "a result of no call": (saying("tool", "12"), "without tool_call_id or name"),
    "an image": (saying("user", [{"type": "image_url"}]), "content in message 1 that is no text"),
    "nobody asks": (saying("assistant", "Hello"), "no message of a user"),
    "half a character": (b'{"prompt": "a\\ud800"}', "half a surrogate pair"),
    "Latin 1": (b'{"prompt": "a"}\n{"prompt": "caf\xe9"}\n', "line 2 is not UTF-8"),
    "blank": (b"\xef\xbb\xbf\r\n \r\n", "the file holds no prompts"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "rule"), REFUSED.values(), ids=REFUSED.keys())
def test_a_bad_file_is_refused_with_its_line(load: Load, content: bytes, rule: str) -> None:
    with pytest.raises(SettingError, match=rule) as caught:
        load(content)
    assert caught.value.setting == "prompts"
    assert str(caught.value.value).endswith("mine.jsonl")


ASKED = [{"role": "user", "content": "Who?"}]
TOLD = {"from": "gpt", "value": "Because."}


@pytest.mark.parametrize(
    ("content", "name", "expected", "num_left_out"),
    [
        ("One\n\n   \n  two, in \nThree\\nhalves\n", "mine.txt", ["One", "  two, in ", "Three\\nhalves"], 0),
        (b"\xef\xbb\xbfOne\r\n\r\nTwo\r\n", "mine.txt", ["One", "Two"], 0),
        (b'\xef\xbb\xbf{"prompt": "One"}\r\n\r\n{"prompt": "Two"}\r\n', "mine.jsonl", ["One", "Two"], 0),
        ([{"turns": ["Write.", "Rewrite."], "prompt": None}, {"question": "How many?", "answer": "4"}],
         "mine.jsonl", ["Write.", "How many?"], 0),
        ([{"instruction": "Name three.", "input": ""}, {"instruction": "Sum up.", "input": "A text."}],
         "mine.jsonl", ["Name three.", "Sum up.\n\nA text."], 0),
        ([{"question": "Which?", "context": "A line."}, {"instruction": "Who?", "context": "He did."}],
         "mine.jsonl", ["Which?\n\nA line.", "Who?\n\nHe did."], 0),
        ('[{"prompt": "Who?"}, "Why?"]', "mine.jsonl", ["Who?", "Why?"], 0),
        ('\ufeffid;prompt;category\n1;"Who, and\nwhy?";a\n2;NA;b\n', "mine.csv", ["Who, and\nwhy?", "NA"], 0),
        # By its value: SpecForge's conversations, and both turns of MT-Bench on the hub.
        ([{"id": 1, "conversation": ASKED}, {"conversations": ASKED}, {"prompt": ["Why?", "So?"]}],
         "mine.jsonl", ["Who?", "Why?"], 0),
        ([{"url": "x y z", "body": {"messages": ASKED}}, {"body": {"prompt": "Why?"}}],
         "mine.jsonl", ["Who?", "Why?"], 0),
        ([*({"prompt": text} for text in ("Why?", " ", None)), {"conversations": [TOLD]}, {"messages": []},
          {"turns": []}], "mine.jsonl", ["Why?"], 5),
    ],
)  # fmt: skip
def test_the_questions_of_a_file_are_found_and_rows_without_one_counted(
    load: Load, content: Any, name: str, expected: list[str], num_left_out: int
) -> None:
    loaded = load(content, name)
    assert (texts(loaded), loaded.num_left_out) == (expected, num_left_out)


def test_a_file_that_cannot_be_read_says_why(load: Load, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").touch()
    with pytest.raises(SettingError, match=r"no such file \(did you mean questions\.jsonl\?\)$"):
        load_prompts(PromptSettings(name="q", file=str(tmp_path / "question.jsonl")))
    with pytest.raises(SettingError, match=r"no such file$"):
        load_prompts(PromptSettings(name="q", file=str(tmp_path / "zebra.txt")))
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "device.txt").symlink_to("/dev/zero")
    for endless in ("pipe.jsonl", "device.txt"):
        with pytest.raises(SettingError, match="a pipe or a device, which may have no end"):
            load_prompts(PromptSettings(name="q", file=str(tmp_path / endless)))
    with pytest.raises(SettingError, match="more cells than headings"):
        load("prompt\nHello, world\n", "mine.csv")
    with pytest.raises(SettingError, match=r"template.*cannot be read"):
        PromptSettings(name="mine", file="mine.csv", template="{")
    with pytest.raises(SettingError, match=r"no such file, and no such directory$"):
        load_prompts(PromptSettings(name="q", file=str(tmp_path / "absent" / "questions.jsonl")))


PLACEHOLDERS = [
    "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH",
    *("<placeholder>", "TODO", "[insert prompt here]", "Lorem ipsum dolor sit\namet"),
]
ABOUT_SUCH_THINGS = [
    "Explain what a placeholder is in Python's format strings.",
    "Data should be fetched from two web pages and joined. Write the program.",
    "WHO INVENTED THE TELEPHONE?",
]


def test_a_text_that_calls_itself_a_placeholder_is_refused(load: Load) -> None:
    for text in PLACEHOLDERS:
        with pytest.raises(SettingError, match="1 of 2 prompts are placeholders"):
            load([{"prompt": "What is rain?"}, {"prompt": text}])
    for text in ABOUT_SUCH_THINGS:
        assert texts(load([{"prompt": text}])) == [text]


def test_turns_are_asked_one_after_another(tmp_path: Path) -> None:
    rows = [{"turns": ["A", "B"]}, {"turns": ["C"]}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = PromptSettings(name="mine", file=str(tmp_path / "t.jsonl"), turns="all")
    loaded = load_prompts(settings)
    assert [prompt.turns for prompt in loaded.prompts] == [("A", "B"), ()]
    second = loaded.at(loaded.index(Occurrence(0, turn=1)))
    assert (second.text, second.turn) == ("B", 2)
    assert loaded.prompts[0].after(["answer"]).text == "B"


def test_an_answer_is_text_or_numbers_of_tokens(load: Load) -> None:
    [prompt] = load([{"prompt": "A", "token_ids": "[]", "completion": "B"}]).prompts
    assert prompt.completion == "B"
    [prompt] = load([{"prompt": "A", "token_ids": "[1, 2]"}]).prompts
    assert prompt.completion == (1, 2)
    [prompt] = load([{"prompt": "A", "completion": "[1, 2]"}]).prompts
    assert prompt.completion == "[1, 2]", "a text of brackets and numbers"
    [prompt] = load([{"messages": [*ASKED, {"role": "assistant", "content": "I"}, *ASKED]}]).prompts
    assert prompt.has_answers
    greeting = [{"role": role, "content": "Hi"} for role in ("system", "assistant", "user")]
    assert not load([{"messages": greeting}]).prompts[0].has_answers
    # Two answers to a prompt are two texts to read, and one prompt to send.
    twice = load([{"prompt": "A", "completion": answer} for answer in "BC"])
    assert (len(twice.prompts), twice.num_repeated) == (1, 1)
    for wrong in ([-1], [1.5], 7, "[1 2]"):
        with pytest.raises(SettingError, match="token_ids"):
            load([{"prompt": "A", "token_ids": wrong}])
