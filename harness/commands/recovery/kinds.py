"""Is speculation on, and for which kinds of requests? Some servers answer some kinds without drafts, and do not say so.

Each kind is asked alone: a few prompts, of both arms. Whether drafts were made is what the server reports of the
answers; of one that reports nothing, whether tokens of an answer arrive together; and of one that sends them one by
one, how much faster it is than the regular arm. All three are judged beside the other kinds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from harness.commands.recovery.record import SamplingName
from harness.commands.recovery.sampling import Sampling, samplings
from harness.commands.recovery.workload import (
    Asking,
    Columns,
    PlannedRequest,
    acceptance_of,
    danger,
    refusal,
)
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.protocol import Arm
from harness.engines.requests import RequestRecord
from harness.measuring.progress import say

# With so many draft tokens one should be accepted.
_FEWEST_DRAFTED = 20
# Prompts of each kind, and new tokens of each answer.
_NUM_PROMPTS = 4
_NUM_TOKENS = 24
# Tokens of a prompt that repeats the others, most of which a server may have cached.
_LONG_PROMPT = 160
# With less than this share of what the best kind gains, in tokens at a time or in speed, nothing is drafted.
_LEAST_GAIN = 0.25
# The best kind shows drafts by so many tokens at a time, or by so much speed.
_CLEAR_BURST = 1.2
_CLEAR_SPEEDUP = 1.2

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
        num_in_flight: requests at a time.
        is_long: whether its prompts are long ones that were asked before.
        wanted: texts of a server that heeds it match this; None where texts do not show that.
    """

    sampling: Sampling
    num_in_flight: int = 1
    is_long: bool = False
    wanted: str | None = None


KindVerdict = Literal[
    "drafts",
    "some drafts",
    "none accepted",
    "no drafts",
    "ignored",
    "refused",
    "not asked",
    "no answer",
    "unknown",
]


def kinds(decoding: DecodingSettings, prompt: Sequence[int], chat: bool) -> list[Kind]:
    """The kinds that are asked, a plain one first."""
    greedy = dataclasses.replace(decoding, temperature=0.0, top_k=0, top_p=1.0)

    def with_parameters(name: str, **parameters: Any) -> Sampling:
        return Sampling(name, greedy, parameters)

    drawn = dataclasses.replace(decoding, temperature=1.0, top_k=0, top_p=1.0)
    names = [name for name in get_args(SamplingName) if name not in ("as_asked", "temperature")]
    found = [
        Kind(with_parameters("plain")),
        Kind(with_parameters("beside another"), num_in_flight=2),
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
        Kind(Sampling("temperature=1", drawn)),
    ]
    if chat:
        found.insert(4, Kind(with_parameters("tools", tools=[_TOOL])))
    biased = sorted(set(prompt))[:4]
    plain = dataclasses.replace(decoding, temperature=0.7, top_k=0, top_p=1.0)
    return found + [Kind(each) for each in samplings(plain, biased, names=names)]


def kind_checks(asking: Asking, arm: Arm, regular: Arm | None) -> Iterator[Columns]:
    """Ask an arm each kind of request, and the regular one too.

    Raises:
        RunError: a server answers no more; what was asked before has its rows.
    """
    every = kinds(asking.settings.decoding, asking.prompts[0], asking.settings.engine.asks_chats)
    say(f"{len(every)} kinds of requests: which of them get drafts?")
    seen: list[Answers] = []
    refused: list[Columns] = []
    failure: RunError | None = None
    for number, kind in enumerate(every):
        name = kind.sampling.name
        if why := danger(arm, asking.settings, kind.sampling):
            refused.append(_row(name, "not asked", why))
            continue
        planned = _planned(kind, asking, 1000 * number)
        try:
            why = refusal(arm, planned[0], asking.settings.seed)
            if why is not None:
                refused.append(_row(name, "refused", f"refused: {why}"))
                continue
            if kind.is_long:
                asking.ask(arm, planned, 1, "asking once, for its cache")
            doing = f"asking, {name}"
            records = asking.records(arm, planned, kind.num_in_flight, doing)
            expected = None
            if regular is not None and refusal(regular, planned[0], asking.settings.seed) is None:
                expected = asking.records(regular, planned, kind.num_in_flight, doing)
        except RunError as error:
            failure = error
            refused.append(_row(name, "no answer", str(error)))
            break
        seen.append(Answers(kind, records, expected))
    usual = Usual.of(seen)
    yield from (each.check(usual) for each in seen)
    yield from refused
    if failure is not None:
        raise failure


def _planned(kind: Kind, asking: Asking, first: int) -> list[PlannedRequest]:
    prompts = [tuple(prompt) for prompt in asking.prompts[:_NUM_PROMPTS]]
    if kind.is_long:
        words = [token for prompt in asking.prompts for token in prompt]
        repeated = words * (1 + _LONG_PROMPT // len(words))
        prompts = [(*prompt, *repeated)[:_LONG_PROMPT] for prompt in prompts]
    num_tokens = min(_NUM_TOKENS, asking.settings.decoding.max_new_tokens)
    return [
        PlannedRequest(prompt, kind.sampling, num_tokens, first + number)
        for number, prompt in enumerate(prompts)
    ]


@dataclass(frozen=True)
class Answers:
    """Answers to one kind of request."""

    kind: Kind
    records: Sequence[RequestRecord]
    regular: Sequence[RequestRecord] | None

    @property
    def drafted(self) -> list[int]:
        """Draft tokens of each answer, as far as they are reported."""
        return [record.draft_tokens[0] for record in self.records]

    @property
    def tokens_in_burst(self) -> float | None:
        """Tokens that arrive together after the first ones; None of answers that came at once."""
        bursts = sum(len(record.bursts) - 1 for record in self.records)
        tokens = sum(record.num_tokens - 1 for record in self.records)
        return tokens / bursts if bursts > 0 else None

    @property
    def speedups(self) -> list[float]:
        """The regular arm's time over this one's, of each prompt."""
        if self.regular is None:
            return []
        pairs = zip(self.records, self.regular, strict=True)
        return [
            (other.seconds / max(1, other.num_tokens)) / (own.seconds / max(1, own.num_tokens))
            for own, other in pairs
            if own.seconds > 0
        ]

    def check(self, usual: Usual) -> Columns:
        """What became of it, beside the other kinds."""
        verdict, finding = self._judged(usual)
        wanted = self.kind.wanted
        if wanted is not None and not all(re.match(wanted, one.text) for one in self.records):
            verdict, finding = "ignored", f"taken and ignored; {finding}"
        identical = None
        # Two answers to a request come mixed.
        is_one_text = "n" not in self.kind.sampling.parameters
        is_greedy = self.kind.sampling.decoding.temperature == 0
        if self.regular is not None and is_greedy and is_one_text:
            pairs = zip(self.records, self.regular, strict=True)
            identical = sum(_same(own, other) for own, other in pairs)
        figures = {
            "num_prompts": len(self.records),
            "num_tokens": sum(record.num_tokens for record in self.records),
            "identical_prompts": identical,
        }
        return (
            _row(self.kind.sampling.name, verdict, finding) | figures | acceptance_of(self.records)
        )

    def _judged(self, usual: Usual) -> tuple[KindVerdict, str]:
        num_drafted = sum(self.drafted)
        if num_drafted:
            num_accepted = sum(record.draft_tokens[1] for record in self.records)
            finding = f"{num_drafted} drafted, {num_accepted} accepted"
            num_without = self.drafted.count(0)
            if num_without and usual.all_draft:
                return "some drafts", f"none in {num_without} of {len(self.records)}; {finding}"
            if num_drafted >= _FEWEST_DRAFTED and not num_accepted:
                return "none accepted", finding
            return "drafts", finding
        if usual.reports_drafts:
            return "no drafts", "none reported"
        tokens = self.tokens_in_burst
        if tokens is not None and usual.tokens_in_burst >= _CLEAR_BURST:
            drafts = tokens - 1 >= _LEAST_GAIN * (usual.tokens_in_burst - 1)
            return _by(drafts, f"{tokens:.1f} tokens at a time, up to {usual.tokens_in_burst:.1f}")
        if self.speedups and usual.speedup >= _CLEAR_SPEEDUP:
            slowest, fastest = min(self.speedups), max(self.speedups)
            finding = f"{slowest:.2f}× to {fastest:.2f}× the regular arm's speed"
            least = 1 + _LEAST_GAIN * (usual.speedup - 1)
            if slowest >= least or fastest < least:
                return _by(slowest >= least, finding)
            return "unknown", finding
        return "unknown", "no drafts are reported, and none show in any kind"


@dataclass(frozen=True)
class Usual:
    """What shows of drafts over all kinds.

    Attributes:
        reports_drafts: whether any answer came with their number.
        all_draft: whether all answers of some kind did.
        tokens_in_burst: of the kind with most.
        speedup: the least of the fastest kind.
    """

    reports_drafts: bool
    all_draft: bool
    tokens_in_burst: float
    speedup: float

    @classmethod
    def of(cls, seen: Sequence[Answers]) -> Usual:
        return cls(
            any(any(each.drafted) for each in seen),
            any(all(each.drafted) for each in seen),
            max((each.tokens_in_burst or 0.0 for each in seen), default=0.0),
            max((min(each.speedups) for each in seen if each.speedups), default=0.0),
        )


def _row(kind: str, verdict: KindVerdict, finding: str) -> Columns:
    return {"check": "kind", "sampling": kind, "verdict": verdict, "finding": finding}


def _by(drafts: bool, finding: str) -> tuple[KindVerdict, str]:
    return ("drafts" if drafts else "no drafts"), finding


def _same(own: RequestRecord, other: RequestRecord) -> bool:
    if own.from_text or other.from_text:
        return own.text == other.text
    return own.token_ids == other.token_ids
