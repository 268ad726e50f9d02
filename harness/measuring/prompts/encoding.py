"""Encodes prompts as token ids, and refuses or skips prompts that are too long."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from harness.config.amounts import counted
from harness.config.errors import SettingError
from harness.config.installation import install_command, missing_local
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import PromptSettings, require
from harness.engines.protocol import Chat
from harness.engines.tokenizer import AnyPair, TextTokenizer, Tokenizer
from harness.measuring.measurement import hub_commit
from harness.measuring.progress import say
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.sets import Prompt, PromptSet, lines_in_words
from harness.measuring.prompts.transcripts import Reading, readings_of

# How many more tokens an answer may have when its text is encoded again as part of the next turn's prompt.
_MARGIN = 8
# To find n prompts for a warm-up that are short enough, at most this many times n prompts are encoded.
_MOST_WARMUP = 4

AnySettings = TypeVar("AnySettings", bound=RunSettings)


@dataclass(frozen=True)
class Encoded:
    """Prompts as they are sent.

    Attributes:
        prompts: prompts of the set, in the order of `PromptSet.take`.
        token_ids: the token ids of each prompt.
        num_skipped: how many prompts were left out because they are too long.
        is_cut: whether prompts were cut after they were encoded. `acceptance` does this, to test whether long prompts
            cause low acceptance.
        longest_turn: the most tokens that the prompt of any turn can have, including the earlier answers.
        others: further prompts of the set for a warm-up, none longer than the longest of `prompts`; None if no warm-up
            was asked for, or one of them is refused.
    """

    prompts: tuple[Prompt, ...]
    token_ids: list[list[int]]
    num_skipped: int = 0
    is_cut: bool = False
    longest_turn: int = 0
    others: Encoded | None = None

    @property
    def indices(self) -> list[int]:
        """The indices of the prompts in their set."""
        return [prompt.index for prompt in self.prompts]

    @property
    def chats(self) -> list[Chat]:
        """The messages and tools of each prompt, for servers that apply the template themselves. [] if any prompt was
        cut (`is_cut`, or by `prompts.lengths`), because the whole messages would be longer than the token ids.
        """
        is_sent_as_ids = self.is_cut or _have_lengths(self.prompts)
        return [] if is_sent_as_ids else [prompt.chat() for prompt in self.prompts]

    @property
    def longest(self) -> int:
        """Number of tokens of the longest prompt."""
        return max(map(len, self.token_ids))

    def part(self, places: Sequence[int]) -> Encoded:
        """Return the prompts at these positions, in this order. Fields that describe the whole set stay the same."""
        return dataclasses.replace(
            self,
            prompts=tuple(self.prompts[index] for index in places),
            token_ids=[self.token_ids[index] for index in places],
        )


class Encoder:
    """Encodes the prompts of a run: first turns, later turns, warm-ups, and prompts that users type.

    Attributes:
        planned: the pair, whose tokenizer and context limits are used.
        settings: settings of the run.

    Raises:
        SettingError: if `chat_template=always` is combined with `prompts.lengths`.
    """

    def __init__(self, planned: AnyPair, settings: RunSettings) -> None:
        self.planned = planned
        self.settings = settings
        self._template = _template(planned.tokenizer, settings)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """The token ids of each prompt, through the chat template if one is used.

        A prompt with `num_tokens` is cut to that number. The length is not checked against the models' contexts.

        Raises:
            SettingError: as `Template.encode` and `Template.check_tools` do (the latter is not called if the server
                applies its own template); also if a prompt is shorter than its `num_tokens` or cannot be cut because
                there is no tokenizer, or if it has a token that a model lacks.
        """
        if _have_lengths(prompts) and isinstance(self.planned.tokenizer, TextTokenizer):
            remedy = (
                f": {install_command('local')}"
                if missing_local()
                else ", and there is none of this model"
            )
            rule = f"needs the model's tokenizer to cut texts by tokens{remedy}"
            raise SettingError("prompts.lengths", rule)
        chats = [prompt.chat() for prompt in prompts]
        if not self.settings.engine.asks_chats:
            self._template.check_tools(chats)
        token_ids = []
        for prompt, ids in zip(prompts, self._template.encode(chats), strict=True):
            if prompt.num_tokens is not None and len(ids) < prompt.num_tokens:
                rule = f"a text of this set has only {len(ids)} tokens"
                raise SettingError("prompts.lengths", rule, prompt.num_tokens)
            token_ids.append(ids[: prompt.num_tokens])
        self.planned.check_vocabulary(token_ids)
        return token_ids

    def transcribe(self, prompt: Prompt) -> list[Reading]:
        """The transcripts of a recorded conversation, in this model's tokens.

        Raises:
            SettingError: if the chat template refuses the conversation or hides an answer, or if it has a token that a
                model lacks.
        """
        chats = [prompt.conversation]
        self._template.check(chats)
        self._template.check_tools(chats)
        readings = readings_of(prompt, self._template)
        transcripts = [list(reading.transcript.token_ids) for reading in readings]
        self.planned.check_vocabulary(transcripts)
        return readings

    def encode_set(
        self,
        prompt_set: PromptSet,
        prompts: tuple[Prompt, ...],
        new_tokens: int,
        answers: str | None = None,
        num_others: int = 0,
    ) -> Encoded:
        """Encode prompts of a set. Prompts that are too long are refused or skipped (`prompts.too_long`).

        Prints facts that the settings do not show, such as the number of skipped prompts.

        Args:
            prompts: those prompts of `prompt_set` that are encoded.
            new_tokens: number of tokens that follow each prompt.
            answers: a description of the `new_tokens`, for an error; None if they are `decoding.max_new_tokens`.
            num_others: number of prompts for a warm-up; 0 for no `Encoded.others`, which may have more or fewer.

        Raises:
            SettingError: if a prompt does not fit into a model's context and `prompts.too_long` does not say what to
                do, or if no prompt would be left; and as `encode` does.
        """
        token_ids = self.encode(prompts)
        # The number of tokens of each prompt; of a conversation, that of its last turn, with room for the earlier
        # answers, which are not known yet.
        longest_turns = list(map(len, token_ids))
        for index, prompt in enumerate(prompts):
            if prompt.turns:
                turn = len(prompt.turns) - 1
                [ids] = self.encode([prompt.after([""] * turn)])
                longest_turns[index] = len(ids) + turn * (new_tokens + _MARGIN)
        encoded = self._fitted(Encoded(prompts, token_ids), longest_turns, new_tokens, answers)
        if num_others:
            measured = set(encoded.indices)
            others = [prompt for prompt in prompt_set.prompts if prompt.index not in measured]
            others = others[: _MOST_WARMUP * num_others]
            # A template may refuse prompts that are not measured.
            with contextlib.suppress(SettingError):
                unmeasured = Encoded(tuple(others), self.encode(others))
                short = [
                    place
                    for place, ids in enumerate(unmeasured.token_ids)
                    if len(ids) <= encoded.longest
                ]
                encoded = dataclasses.replace(encoded, others=unmeasured.part(short))
        if prompt_set.num_left_out:
            say(f"left out {counted(prompt_set.num_left_out, 'row')} without a question")
        if prompt_set.num_repeated:
            say(f"left out {counted(prompt_set.num_repeated, 'repeated row')}")
        unsent = Counter(part for prompt in prompt_set.prompts for part in prompt.unsent)
        if unsent:
            parts = ", ".join(f"{part} ({number})" for part, number in unsent.items())
            say(f"not sent, of {counted(len(prompt_set.prompts), 'row')}: {parts}")
        num_chats = sum(len(prompt.chat().messages) > 1 for prompt in encoded.prompts)
        if self._template.choice == "never" and num_chats and not self.settings.engine.asks_chats:
            say(
                f"chat_template=never: {counted(num_chats, 'chat')} read as text, every message with its role"
            )
        return encoded

    def _fitted(
        self,
        encoded: Encoded,
        longest_turns: list[int],
        new_tokens: int,
        answers: str | None,
    ) -> Encoded:
        """Skip or refuse prompts that are too long.

        Args:
            longest_turns: the number of tokens of each prompt; for a conversation, that of its last turn, with room for
                the earlier answers.
        """
        planned, settings = self.planned, self.settings
        assert isinstance(settings, PromptedSettings)
        # The most tokens that a prompt can have; None if no model states its context, or if only the server knows it.
        room = planned.room(new_tokens)
        if room is not None and room < 1:
            limit = room + new_tokens
            new = f"{new_tokens} are new" if answers is None else f"{answers} take {new_tokens}"
            rule = f"leaves no room for a prompt: the context has {limit} tokens, and {new}"
            raise SettingError("decoding.max_new_tokens", rule, settings.decoding.max_new_tokens)
        prompts = encoded.prompts
        long = [
            index for index, size in enumerate(longest_turns) if room is not None and size > room
        ]
        where = lines_in_words([prompts[index].line for index in long], settings.prompts)
        problem = f"{len(long)} of {len(prompts)} prompts are too long ({where})"
        too_long = settings.prompts.too_long
        # If every prompt is too long, none would be left: this is the error at the end.
        if too_long == "skip" and 0 < len(long) < len(prompts):
            say(f"{problem} and are left out")
            kept = [index for index in range(len(prompts)) if index not in long]
            encoded = dataclasses.replace(encoded.part(kept), num_skipped=len(long))
            longest_turns = [longest_turns[index] for index in kept]
        longest_turn = max(longest_turns)
        # A sentence for the error; None if everything fits.
        excess = planned.excess(longest_turn, new_tokens, answers)
        if excess is None:
            return dataclasses.replace(encoded, longest_turn=longest_turn)
        has_turns = any(prompt.turns for prompt in prompts)
        earlier = ", with the answers before its last turn" if has_turns else ""
        longest = f"the longest has {longest_turn} tokens{earlier}; {excess}"
        advice = "leaves none" if too_long == "skip" else "leaves them out"
        raise SettingError("prompts", f"{problem}; {longest}; prompts.too_long=skip {advice}")


def _template(tokenizer: Tokenizer, settings: RunSettings) -> Template:
    """The chat template of a run, or the way in which its prompts are written without one.

    Raises:
        SettingError: if `chat_template=always` is combined with `prompts.lengths`.
    """
    choice = settings.chat_template
    arguments: Mapping[str, Any] = {}
    if settings.engine.asks_chats and not tokenizer.chat_template:
        # The server applies its own template. Token ids are only an estimate of the prompts' lengths.
        choice = "never"
    if isinstance(settings, PromptedSettings):
        arguments = settings.prompts.template_arguments or {}
        if settings.prompts.lengths:
            rule = "cannot be combined with prompts.lengths, which cuts text that is no chat"
            require(choice != "always", "chat_template", rule, choice)
            choice = "never"
    return Template(tokenizer, choice, arguments)


def _have_lengths(prompts: Sequence[Prompt]) -> bool:
    return any(prompt.num_tokens is not None for prompt in prompts)


def origin(settings: PromptSettings) -> str | None:
    """Return the origin and the licence of a prompt set in one line; None if neither is known."""
    parts = []
    if settings.repository is not None:
        revision = settings.revision or "its main branch"
        commit = hub_commit(settings.repository, settings.revision, "dataset")
        if commit not in (None, settings.revision):
            revision += f" as last fetched (commit {commit[:12]})"
        parts.append(f"from {settings.repository} on the hub, at {revision}")
    if settings.licence is not None:
        parts.append(f"licence: {settings.licence}")
    return f"prompts={settings.name}: {'; '.join(parts)}" if parts else None


def last(token_ids: list[int], count: int, bos_token: int | None) -> list[int]:
    """Return at most the last `count` tokens of a text. If the text begins with the beginning-of-sequence token, so
    does the result.

    For example, the last 3 tokens of [1, 5, 6, 7, 8] are [6, 7, 8], or [1, 7, 8] if 1 is the beginning-of-sequence
    token.
    """
    if len(token_ids) <= count:
        return token_ids
    if token_ids[0] == bos_token:
        return [bos_token, *token_ids[len(token_ids) - count + 1 :]]
    return token_ids[len(token_ids) - count :]


def decide_ignore_eos(settings: AnySettings, tokenizer: Tokenizer) -> AnySettings:
    """Return the settings with `decoding.ignore_eos=auto` replaced: True for plain texts, which then continue after
    their end; False for chats. Settings with another value are returned unchanged.
    """
    if settings.decoding.ignore_eos != "auto":
        return settings
    is_chat = settings.engine.asks_chats or _template(tokenizer, settings).is_used
    decoding = dataclasses.replace(settings.decoding, ignore_eos=not is_chat)
    return dataclasses.replace(settings, decoding=decoding)


def completion_ids(tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """The tokens of a prompt's recorded answer; [] if there is none."""
    completion = prompt.completion
    if completion is None or isinstance(completion, tuple):
        return list(completion or ())
    if prompt.messages is None:
        # Encoded by itself, the answer might get a leading space from the tokenizer. So it is encoded after its prompt.
        before = tokenizer.encode(prompt.text)
        whole = tokenizer.encode(prompt.text + completion)
        if whole[: len(before)] == before:
            return whole[len(before) :]
    return tokenizer.encode(completion, add_special_tokens=False)
