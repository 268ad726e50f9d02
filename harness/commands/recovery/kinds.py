"""Is speculation on, and for which kinds of requests? Some servers answer some kinds without drafts, and do not say so.

Each kind is asked alone: a few prompts. Whether drafts were made is what the server reports of the
answers; of one that reports nothing, whether tokens of an answer arrive together. Each kind is compared with
the others.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from harness.commands.recovery.record import SamplingName
from harness.commands.recovery.sampling import Sampling, samplings
from harness.commands.recovery.workload import (
    Asking,
    Columns,
    PlannedRequest,
    acceptance_of,
    crash_risk,
    why_refused,
)
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Arm
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import tokens_in_burst
from harness.measuring.progress import say

# At least one of this many draft tokens should be accepted.
_FEWEST_DRAFTED = 20
# Prompts of each kind, and new tokens of each answer.
_NUM_PROMPTS = 4
_NUM_TOKENS = 24
# Tokens of a prompt that repeats the others; a server may have cached most of them.
_LONG_PROMPT = 160
# With less than this share of what the best kind gains in tokens at a time, nothing is drafted.
_LEAST_GAIN = 0.25
# The best kind must show at least this many tokens at a time to prove that drafts are accepted.
_CLEAR_BURST = 1.2

_SCHEMA = {
    "type": "object",
    "properties": {"answer": {"type": "string"}},
    "required": ["answer"],
}
_GRAMMAR = "root ::= [0-9]+"
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    Attributes:
        sampling: its name, how tokens are drawn, and parameters of the server's API.
        is_long: whether its prompts are long ones that were asked before.
        wanted: texts of a server that heeds it match this; None where texts do not show that.
    """

    sampling: Sampling
    is_long: bool = False
    wanted: str | None = None


def kinds(decoding: DecodingSettings, prompt: Sequence[int], chat: bool) -> list[Kind]:
    """The kinds that are asked, a plain one first."""
    greedy = dataclasses.replace(decoding, temperature=0.0, top_k=0, top_p=1.0)

    def with_parameters(name: str, **parameters: Any) -> Sampling:
        return Sampling(name, greedy, parameters)

    names = [name for name in get_args(SamplingName) if name != "as_asked"]
    asked = [
        Kind(with_parameters("plain")),
        Kind(with_parameters("long cached prompt"), is_long=True),
        Kind(with_parameters("stop texts", stop=["\u2260\u2260"])),
        Kind(
            with_parameters(
                "JSON schema",
                # As vLLM and OpenAI have it, and as llama.cpp does.
                response_format={
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": _SCHEMA},
                },
                json_schema=_SCHEMA,
            ),
            wanted=r"\s*\{",
        ),
        Kind(
            with_parameters("grammar", grammar=_GRAMMAR, structured_outputs={"grammar": _GRAMMAR}),
            wanted=r"[0-9]",
        ),
        Kind(with_parameters("n=2", n=2)),
    ]
    if chat:
        asked.insert(4, Kind(with_parameters("tools", tools=[_TOOL])))
    biased = sorted(set(prompt))[:4]
    # At 0.7 `samplings` tries all others at temperature 1.
    drawn = dataclasses.replace(decoding, temperature=0.7, top_k=0, top_p=1.0)
    return asked + [Kind(sampling) for sampling in samplings(drawn, biased, names=names)]


def kind_checks(asking: Asking, arm: Arm) -> Iterator[Columns]:
    """Ask an arm each kind of request.

    Raises:
        RunError: the server answers no more; what was asked before has its rows.
    """
    settings = asking.settings
    all_kinds = kinds(settings.decoding, asking.prompts[0], settings.engine.asks_chats)
    say(f"{len(all_kinds)} kinds of requests: which of them get drafts?")
    answered: list[AnswersOfKind] = []
    unanswered: list[Columns] = []
    try:
        for number, kind in enumerate(all_kinds):
            name = kind.sampling.name
            planned = _planned(kind, asking, 1000 * number)
            if why := crash_risk(arm, settings, kind.sampling):
                unanswered.append(_columns(name, "not asked", why))
                continue
            try:
                if why := why_refused(arm, planned[0], settings.seed):
                    unanswered.append(_columns(name, "refused", f"refused: {why}"))
                    continue
                if kind.is_long:
                    asking.ask(arm, planned, 1, "asking once, for its cache")
                answers = asking.ask(arm, planned, 1, f"asking, {name}")
            except RunError as error:
                if not _still_answers(arm, asking, all_kinds[0]):
                    unanswered.append(_columns(name, "no answer", str(error)))
                    raise
                unanswered.append(_columns(name, "failed", str(error)))
                continue
            answered.append(AnswersOfKind(kind, [answer.record for answer in answers]))
    finally:
        for kind_answers in answered:
            yield kind_answers.check(answered)
        yield from unanswered


def _still_answers(arm: Arm, asking: Asking, plain: Kind) -> bool:
    """Whether an arm still answers a plain request, after one of another kind has failed."""
    request, *_ = _planned(plain, asking, 0)
    try:
        asking.ask(arm, [request], 1, "asking again")
    except RunError:
        return False
    return True


def _planned(kind: Kind, asking: Asking, first: int) -> list[PlannedRequest]:
    """Requests of a kind, whose indices begin with `first`."""
    prompts = [tuple(prompt) for prompt in asking.prompts[:_NUM_PROMPTS]]
    if kind.is_long:
        words = [token for prompt in asking.prompts for token in prompt]
        repeated = words * (1 + _LONG_PROMPT // len(words))
        prompts = [(*prompt, *repeated)[:_LONG_PROMPT] for prompt in prompts]
    num_tokens = min(_NUM_TOKENS, asking.settings.decoding.max_new_tokens)
    return [
        PlannedRequest(prompt, kind.sampling, num_tokens, index)
        for index, prompt in enumerate(prompts, start=first)
    ]


@dataclass(frozen=True)
class AnswersOfKind:
    """Answers to one kind of request."""

    kind: Kind
    records: Sequence[RequestRecord]

    @property
    def drafted(self) -> list[int]:
        """Draft tokens of each answer, as far as they are reported."""
        return [record.draft_tokens[0] for record in self.records]

    def check(self, all_answers: Sequence[AnswersOfKind]) -> Columns:
        """The verdict on this kind of request, compared with every kind."""
        verdict, finding = self._judged(all_answers)
        wanted = self.kind.wanted
        if wanted is not None and not all(re.match(wanted, record.text) for record in self.records):
            verdict, finding = "ignored", f"taken and ignored; {finding}"
        return {
            **_columns(self.kind.sampling.name, verdict, finding),
            "num_tokens": sum(record.num_tokens for record in self.records),
            **acceptance_of(self.records),
        }

    def _judged(self, all_answers: Sequence[AnswersOfKind]) -> tuple[str, str]:
        num_drafted = sum(self.drafted)
        if num_drafted:
            num_accepted = sum(record.draft_tokens[1] for record in self.records)
            finding = f"{num_drafted} drafted, {num_accepted} accepted"
            num_without = self.drafted.count(0)
            if num_without and any(all(answers.drafted) for answers in all_answers):
                return "some drafts", f"none in {num_without} of {len(self.records)}; {finding}"
            is_enough = num_drafted >= _FEWEST_DRAFTED
            return ("none accepted" if is_enough and not num_accepted else "drafts"), finding
        if any(any(answers.drafted) for answers in all_answers):
            return "no drafts", "none reported"
        tokens = tokens_in_burst(self.records)
        most_tokens = max(tokens_in_burst(answers.records) for answers in all_answers)
        if tokens and most_tokens >= _CLEAR_BURST:
            has_drafts = tokens - 1 >= _LEAST_GAIN * (most_tokens - 1)
            finding = f"{tokens:.1f} tokens at a time, up to {most_tokens:.1f}"
            return ("drafts" if has_drafts else "no drafts"), finding
        return "unknown", "no drafts are reported, and none show in any kind"


def _columns(kind: str, verdict: str, finding: str) -> Columns:
    return {"check": "kind", "sampling": kind, "verdict": verdict, "finding": finding}
