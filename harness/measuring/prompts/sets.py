"""Prompt sets, from files on this machine or on the hub.

A `.txt` file has one prompt per line. A table (`.jsonl`, a `.json` array, `.csv`, `.parquet`) has one prompt per row. A
row contains its prompt in one of these columns:

    column           contents                                used by
    prompt           a text                                  HumanEval
    turns            a list of the user's texts              MT-Bench, Spec-Bench, SPEED-Bench
    messages         a chat
    conversations    a list of texts, or of objects          ShareGPT
    question         a text, with `context` if there is one  GSM8K, SQuAD
    instruction      a text, with `input` or `context`       Alpaca, Dolly

A row may also have a `category`, `tools`, and a `completion`, which is a recorded answer to the prompt. The recorded
answers of a chat are among its messages. Settings can name other columns, or make the prompt from several columns.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import random
import re
import string
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.config.errors import SettingError
from harness.config.installation import PACKAGE
from harness.config.settings import PROMPT_COLUMNS, PromptSettings
from harness.engines.protocol import Chat, Message
from harness.measuring.prompts.messages import completion_of, messages_of, text_of, tools_of
from harness.measuring.prompts.prompt_files import BadFile, NoQuestion, local_files, read_rows
from harness.results.runs import grouped

# If a licence forbids copying a text, SPEED-Bench publishes a line in capitals that says where to fetch the text. Only
# lines in capitals match, because "Data should be fetched ..." may be a real prompt.
_FETCH_ORDER = re.compile(
    r"\b(DATA|PROMPTS?|TEXT|CONTENT)\b.*\b(FETCHED|DOWNLOADED|REPLACED|INSERTED)\b", re.DOTALL
)
_PLACEHOLDER = re.compile(
    r"\W*(placeholder|todo|tbd|(your|insert) (prompt|question|text)( here)?|lorem ipsum.*)\W*",
    re.I | re.S,
)
# More characters than the tokens of any natural text have on average. So a text that is cut to this many characters per
# token has enough tokens in any language and vocabulary.
_CHARACTERS_PER_TOKEN = 12
# Columns that may contain the prompt, in order of precedence.
_KEYS = tuple(column for column in PROMPT_COLUMNS if column != "category")
# Columns with parts of a prompt or request that a row may store but that are not sent.
_UNSENT = """
    context input passage passages document documents article story choices options
    system system_prompt instructions image images image_url audio video files
    max_tokens max_completion_tokens max_new_tokens max_output_tokens output_tokens output_len output_length
    n_predict num_predict max_length min_tokens temperature temp top_p top_k min_p stop stop_sequences
    repetition_penalty repeat_penalty frequency_penalty presence_penalty logit_bias tool_choice
    chat_template_kwargs response_format continue_final_message
""".split()
# Columns with a text whose subject is in another column (`input` or `context`).
_WITH_SUBJECT = ("instruction", "question")
# Roles whose messages a model answers.
_ASKS = ("user", "tool")
# Endings of files whose messages name lines. For other files, they name rows.
_BY_LINE = (".txt", ".jsonl")
# The most line numbers or categories that a message lists.
_MOST_NAMED = 15


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set.

    Attributes:
        text: the prompt; for a chat, the text of the last of `messages`, which is from the user or a tool.
        category: the kind of task; None if the row has no category.
        messages: for a chat, its messages up to the last message that a model answers; None for plain text.
        tools: for a chat, the tools that the model may call.
        following: for a chat, the messages after `messages`: the answer, if one was recorded; in an `opening`, all
            messages from the first answer on.
        index: in a loaded set its place, from 0; in a prompt that is sent `PromptSet.index`. The index and the seed
            determine the random numbers of its answer.
        line: its line in the file, or row of the table, from 1.
        num_tokens: the number of tokens that the text is cut to; None for the whole text.
        turns: for a conversation that is sent turn by turn, all texts of the user, from the first turn on; empty for a
            single turn.
        turn: for a turn of a conversation, the number of the turn, from 1; None for any other prompt.
        completion: for plain text, the recorded answer as text or as token ids; None without one.
        unsent: names of the parts of its row that are not sent.
    """

    text: str
    category: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: tuple[Message, ...] = ()
    following: tuple[Message, ...] = ()
    index: int = field(default=0, compare=False)
    line: int = field(default=0, compare=False)
    num_tokens: int | None = None
    turns: tuple[str, ...] = ()
    turn: int | None = None
    completion: str | tuple[int, ...] | None = None
    unsent: tuple[str, ...] = field(default=(), compare=False)

    def chat(self) -> Chat:
        """The chat for a chat template; plain text becomes one user message."""
        return Chat(self.messages or ({"role": "user", "content": self.text},), self.tools)

    @property
    def conversation(self) -> Chat:
        """The whole chat, including recorded answers."""
        return Chat((*self.chat().messages, *self.following), self.tools)

    @property
    def opening(self) -> Prompt:
        """The prompt up to the first recorded answer; the answer and all later messages are then in `following`. `text`
        stays that of the whole prompt.
        """
        messages = self.conversation.messages
        answers = answers_in(messages)
        if not answers:
            return self
        end = answers[0]
        return dataclasses.replace(self, messages=messages[:end], following=messages[end:])

    @property
    def has_answers(self) -> bool:
        """Whether the file contains an answer to this prompt."""
        return self.completion is not None or bool(self.opening.following)

    def after(self, answers: Sequence[str], left_out: int = 0) -> Prompt:
        """The prompt of the turn that follows these answers to the earlier turns of a conversation.

        With the turns "A", "B", "C" and the answers ["x", "y"], the messages are A, x, B, y, C; with `left_out=1` they
        are B, y, C.

        Args:
            left_out: how many of the oldest turns are left out, with their answers.
        """
        chat = [*self.chat().messages[:-1], {"role": "user", "content": self.turns[left_out]}]
        later = zip(answers[left_out:], self.turns[left_out + 1 :], strict=False)
        for answer, text in later:
            chat.append({"role": "assistant", "content": answer})
            chat.append({"role": "user", "content": text})
        return dataclasses.replace(self, text=chat[-1]["content"], messages=tuple(chat))


def answers_in(messages: Sequence[Message]) -> list[int]:
    """The indices of the recorded answers. An assistant's message before the first message that a model answers, such
    as a greeting, is none.
    """
    roles = [message["role"] for message in messages]
    first = next((index for index, role in enumerate(roles) if role in _ASKS), len(roles))
    return [index for index in range(first, len(roles)) if roles[index] == "assistant"]


class Occurrence(NamedTuple):
    """One sending of a prompt: the prompt's place in the set, its turn, and how often it was sent before; all count
    from 0.
    """

    place: int
    turn: int = 0
    repeat: int = 0


@dataclass(frozen=True)
class PromptSet:
    """Prompts in the order of their file.

    Attributes:
        digest: identifies the texts and messages; it does not depend on the file format.
        seed: with a seed, `take` draws prompts of each category at random; with None, it takes the first prompts of
            each.
        num_left_out: number of rows without a question.
        num_repeated: number of rows that repeat another one.
    """

    name: str
    prompts: tuple[Prompt, ...]
    digest: str
    seed: int | None = None
    num_left_out: int = 0
    num_repeated: int = 0

    def take(self, count: int) -> tuple[Prompt, ...]:
        """Return `count` prompts, taking one from each category, then another from each, and so on. With the categories
        a, a, a, b, b, the order of the prompts is 0, 3, 1, 4, 2. With neither a seed nor categories, the order is that
        of the set.

        Raises:
            SettingError: if the set has fewer than `count` prompts.
        """
        if count > len(self.prompts):
            raise SettingError(
                "num_prompts", f"the prompt set {self.name} has only {len(self.prompts)}", count
            )
        members = grouped(self.prompts, lambda prompt: prompt.category)
        if self.seed is not None:
            shuffler = random.Random(self.seed)
            for category_prompts in members.values():
                shuffler.shuffle(category_prompts)
        taken: list[Prompt] = []
        for one_of_each in itertools.zip_longest(*members.values()):
            # A category that has no prompt left contributes None.
            taken += [prompt for prompt in one_of_each if prompt is not None]
        return tuple(taken[:count])

    def index(self, occurrence: Occurrence) -> int:
        """The index of one sending of a prompt, or of a turn of a conversation.

        For example, in a set of 10 conversations of 2 turns, the turns of the fourth conversation have the indices 3
        and 13. When the conversation is sent again, they have the indices 23 and 33.
        """
        times = occurrence.turn + self._most_turns * occurrence.repeat
        return occurrence.place + len(self.prompts) * times

    def occurrence(self, index: int) -> Occurrence:
        """The reverse of `index`."""
        times, place = divmod(index, len(self.prompts))
        repeat, turn = divmod(times, self._most_turns)
        return Occurrence(place, turn, repeat)

    def at(self, index: int) -> Prompt:
        """The prompt to which an index belongs; the index may be that of a later turn, or of a repeated sending. Of a
        conversation, only `text` and `turn` are those of the turn.
        """
        occurrence = self.occurrence(index)
        prompt = dataclasses.replace(self.prompts[occurrence.place], index=index)
        if not prompt.turns:
            return prompt
        return dataclasses.replace(
            prompt, text=prompt.turns[occurrence.turn], turn=occurrence.turn + 1
        )

    def first_unused(self, num_asked: int, num_measured: int) -> int:
        """Return an index above all indices that are used when `num_measured` of these prompts are sent, some of them
        repeatedly, `num_asked` times in all, with all their turns.
        """
        # Rounded up: how often each prompt is sent at most.
        times = -(-num_asked // num_measured)
        return self.index(Occurrence(0, repeat=max(1, times)))

    @functools.cached_property
    def _most_turns(self) -> int:
        return max(1, *(len(prompt.turns) for prompt in self.prompts))


def lines_in_words(lines: Iterable[int], settings: PromptSettings) -> str:
    """Line numbers in words: `line 3 of mine.txt`, `lines 3, 5, 8 of prompts=tiny`, `row 3 of mine.csv`. Of more than
    `_MOST_NAMED` lines, only the first are named, with the number of the others.
    """
    ascending = sorted(lines)
    named = ", ".join(map(str, ascending[:_MOST_NAMED]))
    if len(ascending) > _MOST_NAMED:
        named += f" and {len(ascending) - _MOST_NAMED} more"
    # With several files, this is their pattern, `{a,b}.jsonl`.
    file = Path(settings.file)
    is_own = settings.repository is None and not file.is_relative_to(PACKAGE)
    name = file.name if is_own else f"prompts={settings.name}"
    place = "line" if file.suffix in _BY_LINE else "row"
    return f"{place}{'s' if len(ascending) > 1 else ''} {named} of {name}"


def load_prompts(settings: PromptSettings, *, with_answers: bool = False) -> PromptSet:
    """Read a prompt set. Of the rows of a category that are sent alike, only the first becomes a prompt, because an
    interval over prompts needs different prompts.

    Args:
        with_answers: whether rows with different recorded answers to the same prompt are all kept.

    Raises:
        SettingError: if a file is missing, cannot be read, is not UTF-8 or not JSON, has no prompts, has placeholders,
            or lacks columns that the settings name.
        RunError: if the set is on the hub, and the hub cannot be reached.
    """
    read: list[Prompt] = []
    num_left_out = 0
    for name, path in zip(settings.files, local_files(settings), strict=True):
        try:
            prompts_of_file, num_unasked = _prompts_of(path, settings)
            read += prompts_of_file
            num_left_out += num_unasked
        except BadFile as bad:
            raise SettingError("prompts", str(bad), name) from bad
    different: dict[str, Prompt] = {}
    for prompt in read:
        sent = dataclasses.replace(prompt, line=0, unsent=())
        if not with_answers:
            sent = dataclasses.replace(sent, completion=None, following=())
        different.setdefault(repr(sent), prompt)
    kept = [*different.values()]
    num_repeated = len(read) - len(kept)
    if settings.lengths:
        kept = _cut(kept, settings.lengths)
    prompts = tuple(dataclasses.replace(prompt, index=index) for index, prompt in enumerate(kept))
    contents = []
    for prompt in prompts:
        # Empty values are left out, so that they do not change the digest.
        further = filter(None, (prompt.num_tokens, prompt.turns, prompt.tools))
        contents.append(json.dumps([prompt.text, prompt.messages, *further]))
    digest = hashlib.sha256("\n".join(contents).encode()).hexdigest()[:12]
    return PromptSet(settings.name, prompts, digest, settings.seed, num_left_out, num_repeated)


def _prompts_of(path: Path, settings: PromptSettings) -> tuple[list[Prompt], int]:
    """The prompts of one file, and the number of rows without a question. If there are several files, the name of the
    file is the category of rows without one.
    """
    prompts = []
    left_out: list[str] = []
    category = path.stem if len(settings.files) > 1 else None
    rows = [*read_rows(path, settings.source)]
    arms = [row.get("arm") for _, row in rows if isinstance(row, dict)]
    for number, row in rows:
        if "regular" in arms and row.get("arm") == "speculative":
            continue  # a row of `latency_prompts.csv`; the regular arm's row has the same prompt
        try:
            prompt = _from_row(row, settings)
        except BadFile as bad:
            where = f"{'line' if path.suffix in _BY_LINE else 'row'} {number}"
            if isinstance(bad, NoQuestion):
                left_out.append(f"{where} {bad}")
                continue
            raise BadFile(f"{where} {bad}") from None
        prompts.append(
            dataclasses.replace(prompt, line=number, category=prompt.category or category)
        )
    if not prompts:
        raise BadFile(left_out[0] if left_out else "the file holds no prompts")
    placeholders = [
        prompt.text
        for prompt in prompts
        if _PLACEHOLDER.fullmatch(prompt.text)
        or (prompt.text.isupper() and _FETCH_ORDER.search(prompt.text))
    ]
    if placeholders:
        first = textwrap.shorten(placeholders[0], 60, placeholder=" …")
        problem = f'{len(placeholders)} of {len(prompts)} prompts are placeholders ("{first}")'
        advice = (
            settings.source or "fetch the real texts with the script that comes with the data set"
        )
        raise BadFile(f"{problem}; {advice}")
    return prompts, len(left_out)


def _cut(documents: Sequence[Prompt], lengths: Sequence[int]) -> list[Prompt]:
    """For each document, make a prompt that begins with the document and will be cut to one of the lengths, which is
    its category.

    The lengths alternate: with lengths 512 and 4096, documents 0, 2, 4, ... become prompts of 512 tokens. If a document
    is too short, the next documents are added to it, and after the last document the first. No document occurs twice in
    a prompt, because repeated text would be easy to predict.

    Args:
        lengths: numbers of tokens.

    Raises:
        SettingError: if all documents together are too short, or if any document is a chat of several messages or with
            tools.
    """
    documents = [*{document.text: document for document in documents}.values()]
    chats = [document.chat() for document in documents]
    if any(chat.has_tools or len(chat.messages) > 1 for chat in chats):
        rule = "cuts texts, and the prompts of this set are chats"
        raise SettingError("prompts.lengths", rule, max(lengths))
    most = sum(len(document.text) for document in documents) // _CHARACTERS_PER_TOKEN
    if most < max(lengths):
        rule = f"must be at most {most:,} tokens: this set has no more text"
        raise SettingError("prompts.lengths", rule, max(lengths))
    prompts = []
    for first, document in enumerate(documents):
        length = lengths[first % len(lengths)]
        num_characters = _CHARACTERS_PER_TOKEN * length
        text = document.text
        for following in [*documents[first + 1 :], *documents[:first]]:
            if len(text) >= num_characters:
                break
            text = f"{text}\n\n{following.text}"
        category = f"{length} tokens"
        prompts.append(
            Prompt(text[:num_characters], category, line=document.line, num_tokens=length)
        )
    return prompts


def _from_row(row: Any, settings: PromptSettings) -> Prompt:
    """The prompt of a row, which is a text, or a mapping from columns to values."""
    if isinstance(row, str):
        row = {"prompt": row}
    if not isinstance(row, dict):
        raise BadFile("must be an object with prompt, turns or messages")
    columns = _with_known_columns(row, settings)
    if not any(columns.get(key) is not None for key in _KEYS):
        columns = _with_messages(columns) or columns
    prompt = _of_first_key(columns)
    tools = tools_of(columns.get("tools"))
    category = None if columns.get("category") in (None, "") else str(columns["category"])
    completion = completion_of(columns)
    # With `turns=first`, or a single turn, only the prompt's text is sent.
    turns = prompt.turns if settings.turns == "all" and len(prompt.turns) > 1 else ()
    messages = prompt.messages
    # Requests to Anthropic's API contain the system prompt in a field next to their messages.
    own_system = columns.get("system") if messages else None
    for system, name in ((own_system, "system"), (settings.system, "prompts.system")):
        if system:
            chat = messages or prompt.chat().messages
            if chat[0]["role"] == "system":
                raise BadFile(f"has a system prompt already, besides {name}")
            messages = (*messages_of([{"role": "system", "content": system}]), *chat)
    return dataclasses.replace(
        prompt,
        category=category,
        completion=completion,
        turns=turns,
        messages=messages,
        tools=tools,
        unsent=tuple(_unsent(columns, prompt)),
    )


def _unsent(row: Mapping[str, Any], prompt: Prompt) -> Iterator[str]:
    """Yield the names of the parts of a row that are not sent with its prompt: images, settings, a system prompt next
    to plain text.
    """
    key = next(key for key in _KEYS if row.get(key) is not None)
    sent = ["system"] if prompt.messages else []
    if key in _WITH_SUBJECT and isinstance(row[key], str):
        sent.append("input" if row.get("input") else "context")
    yield from (part for part in _UNSENT if row.get(part) and part not in sent)
    # Messages in the form of ShareGPT, of which only the user's are sent.
    if _has_objects(row[key], "from") and any(turn["from"] == "system" for turn in row[key]):
        yield "system"
    # A stored request (it has `max_tokens`) whose last message is from the assistant asks to continue that message.
    if prompt.following and "max_tokens" in row:
        yield "the beginning of the answer"


def _with_known_columns(row: Mapping[str, Any], settings: PromptSettings) -> dict[str, Any]:
    """The row, with the columns that `prompts.columns` names renamed, and with the prompt that `prompts.template`
    makes.
    """
    named = {}
    others = dict(row)
    for known, column in (settings.columns or {}).items():
        named[known] = _column(row, str(column), f"prompts.columns.{known}")
        others.pop(str(column), None)
    if settings.template is not None:
        text = ""
        for literal, column, _, _ in string.Formatter().parse(settings.template):
            text += literal
            if column is not None:
                value = _column(row, column, "prompts.template")
                if column != "category":
                    others.pop(column, None)
                # A list is written with one entry per line.
                lines = value if isinstance(value, list) else [value]
                text += "\n".join(str(line) for line in lines if line is not None)
        named["prompt"] = text
    if any(key in named for key in _KEYS):
        others = {column: value for column, value in others.items() if column not in _KEYS}
    return others | named


def _column(row: Mapping[str, Any], column: str, setting: str) -> Any:
    """The row's value in a column that a setting names. Raises a BadFile if the row has no such column."""
    if column not in row:
        raise BadFile(f"has no column {column}, which {setting} names; it has {', '.join(row)}")
    return row[column]


def _of_first_key(row: Mapping[str, Any]) -> Prompt:
    """The prompt in the first of the known columns (`_KEYS`) that the row fills. Its value may be a text, turns or
    messages.

    Raises:
        NoQuestion: if the value is blank, or has no message of a user; the row is then left out.
        BadFile: for any other value that is not a prompt.
    """
    key = next((key for key in _KEYS if row.get(key) is not None), None)
    if key is None and not row.keys().isdisjoint(_KEYS):
        raise NoQuestion("has nothing as its prompt")
    if key is None:
        rule = f"has none of {', '.join(_KEYS)}; it has {', '.join(row) or 'nothing'}"
        raise BadFile(f"{rule}; 'prompts.columns={{prompt: COLUMN}}' names another")
    value = row[key]
    if _has_objects(value, "from"):
        value = [entry.get("value") for entry in value if entry["from"] in ("human", "user")]
        if not value:
            raise NoQuestion(f"has nothing from a human among its {key}")
    elif key == "messages" or _has_objects(value, "role"):
        messages = messages_of(value)
        asked = [index for index, message in enumerate(messages) if message["role"] in _ASKS]
        if not asked:
            raise NoQuestion("has no message of a user among its messages")
        end = asked[-1] + 1
        return Prompt(
            messages[end - 1]["content"],
            messages=messages[:end],
            following=messages[end:],
        )
    if key in ("turns", "conversations") or isinstance(value, list):
        if not isinstance(value, list):
            raise BadFile(f"must have a list of texts as {key}")
        turns = [text_of(turn, f"every one of {key}") for turn in value]
        return Prompt(turns[0], turns=tuple(turns))
    if row.get("prompt_index") and row.get("turn") not in (None, "", "1"):
        # This is a row of a file of results, which does not contain the earlier turns.
        raise BadFile("is one turn of a conversation: take the file of conversations as prompts")
    if isinstance(value, str) and not value.strip():
        raise NoQuestion(f"must have text as {key}")
    text = text_of(value, key)
    # The subject of an instruction or a question is in a column of its own, which is often empty.
    subject = row.get("input") or row.get("context")
    if key in _WITH_SUBJECT and subject:
        text = f"{text}\n\n{text_of(subject, 'input or context')}"
    return Prompt(text)


def _with_messages(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """The row with its messages under the name `messages`; None if it has no messages.

    The messages may be in a column of any name, or within an object: `conversation`, `body.messages`. A stored request
    to complete a text contains a text instead, `body.prompt`, which becomes `prompt`.
    """
    body = row.get("body")
    if isinstance(body, dict) and isinstance(body.get("prompt"), str):
        return {**row, "prompt": body["prompt"]}
    for value in row.values():
        if isinstance(value, dict) and (inner := _with_messages(value)):
            return {**row, **inner}
        if value and (_has_objects(value, "role") or _has_objects(value, "from")):
            return {**row, "messages": value}
    return None


def _has_objects(value: Any, part: str) -> bool:
    """Whether a value is a list of objects that all have this key."""
    return isinstance(value, list) and all(
        isinstance(entry, dict) and part in entry for entry in value
    )
