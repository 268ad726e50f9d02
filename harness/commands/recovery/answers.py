"""Answers that were recorded, a JSON object per line: are they draws of the target? Nothing is asked again.

A line has `prompt`, `prompt_token_ids` or `messages`, the answer (`token_ids`, `completion` or `text`, or `choices` as
OpenAI's API has them), and the settings of the request. `request` and `response` may hold these.

Tokens that end a text are left out, whether they were recorded or not: given that a text goes on, its next token
follows the target's distribution without them.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scored import TOGETHER
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import Answer, Columns, PlannedRequest
from harness.config.amounts import counted
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.door.reference import TextReference
from harness.engines.requests import RequestRecord
from harness.measuring.prompts.encoding import completion_ids, encode
from harness.measuring.prompts.sets import Prompt
from harness.measuring.references import References
from harness.measuring.reported import ReportedReference
from harness.measuring.session import Session
from harness.results.statistics.drawn_tokens import TokenTest

_DECODING = ("temperature", "top_p", "top_k")
# Of requests: the value that changes nothing.
_PARAMETERS = {
    "min_p": 0,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "logit_bias": None,
}
# What makes of a text no plain draw, or one whose recorded end depends on what followed.
_OTHERS = (
    *("stop", "tools", "response_format", "grammar", "json_schema", "guided_json"),
    *("structured_outputs", "truncate_prompt_tokens"),
)


class _LeftOut(Exception):
    """Why a line cannot be used."""


def recorded_checks(session: Session, settings: RecoverySettings) -> Iterator[Columns]:
    """Score the answers of a file by the weights, or by a server that speculates with none of them.

    Raises:
        SettingError: the file cannot be read, no line can be used, or nothing scores texts.
    """
    path = Path(str(settings.answers))
    answers: list[Answer] = []
    reasons: Counter[str] = Counter()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("answers", f"cannot be read: {error}", str(path)) from error
    for number, line in enumerate(filter(str.strip, lines)):
        try:
            answers.append(_read(session, settings, line, number))
        except _LeftOut as left_out:
            reasons[str(left_out)] += 1
    why = ", ".join(f"{reason}: {number}" for reason, number in reasons.most_common())
    if not answers:
        raise SettingError("answers", f"has no line that can be used ({why})", str(path))
    longest_prompt = max(len(answer.request.prompt) for answer in answers)
    longest = max(len(answer.record.token_ids) for answer in answers)
    session.place(TOGETHER, longest_prompt, longest)
    engine = session.open(TOGETHER, longest_prompt)
    reference: TextReference | None = None
    if settings.reference != "regular":
        reference = References(session).for_texts()
    if reference is None:
        scoring = [arm for arm in engine.arms if arm.scores is not None]
        if not scoring:
            rule = "needs a model= whose weights load here, or the url= of a server with log-probabilities of texts"
            raise SettingError("answers", rule, str(path))
        texts = [(answer.request.prompt, answer.record.token_ids) for answer in answers]
        num_top = settings.top_logprobs
        reference = ReportedReference(
            scoring[0], texts[0][0], len(session.tokenizer), num_top, TOGETHER
        )
        reference.learn_rounding(texts)
        known = [answer for answer in answers if answer.request.sampling.is_known_by(num_top)]
        if len(known) < len(answers):
            why += f"{', ' if why else ''}top_logprobs is not enough: {len(answers) - len(known)}"
        answers = known
    from_text = sum(answer.record.from_text for answer in answers)
    found = f"{counted(len(answers), 'answer')} of {path.name}"
    if from_text:
        found += f", {from_text} of them as text, of which other tokens may have been drawn"
    if why:
        found += f"; left out: {why}"
    yield {"check": "answers", "finding": found, "num_prompts": len(answers)}
    answers = _without_ends(answers, sorted(session.end_tokens()))
    drawn = [answer.request.sampling for answer in answers if not answer.request.is_greedy]
    samplings = list({sampling.name: sampling for sampling in drawn}.values())
    token_test = TokenTest(settings.false_alarm_rate / (len(samplings) + 1), settings.shift)
    ends = session.end_tokens()
    scores = Scores(reference, samplings, token_test, ends, TOGETHER, [settings.seed, 1])
    scores.add(answers)
    greedy, *of_draws = scores.checks()
    if scores.greedy.divergences:
        yield greedy
    yield from of_draws


def _read(session: Session, settings: RecoverySettings, line: str, number: int) -> Answer:
    """The answer of a line. Raises _LeftOut."""
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise _LeftOut("no JSON")
    asked = {**row, **_inner(row, "request")}
    answered = {**row, **_inner(row, "response")}
    choice, *others = answered.get("choices") or [answered]
    if others:
        raise _LeftOut("several answers")
    answered |= choice
    completion = _completion(answered)
    messages = asked.get("messages")
    text = asked.get("prompt") or ""
    token_ids = asked.get("prompt_token_ids") or answered.get("prompt_token_ids")
    if isinstance(text, list):
        token_ids = text
        text = ""
    if not (messages or text or token_ids):
        raise _LeftOut("no prompt")
    prompt = Prompt(text, completion=completion)
    if messages:
        prompt = Prompt("", messages=tuple(messages), completion=completion)
    if not token_ids:
        [token_ids] = encode(session.planned, settings, [prompt])
    tokens = completion_ids(session.tokenizer, prompt)
    from_text = isinstance(completion, str)
    if from_text:
        # The last token of a text may be a part of one.
        tokens = tokens[:-1]
    if not tokens:
        raise _LeftOut("no answer")
    if session.planned.excess([token_ids], len(tokens)) is not None:
        raise _LeftOut("longer than the context")
    sampling = _sampling(settings.decoding, asked)
    request = PlannedRequest(tuple(token_ids), sampling, len(tokens), number)
    record = RequestRecord(
        number, len(token_ids), token_ids=tokens, num_tokens=len(tokens), from_text=from_text
    )
    return Answer(request, record)


def _inner(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What a log has in an object of its own, such as that of OpenAI's batches."""
    inner = row.get(name)
    body = inner.get("body", inner) if isinstance(inner, dict) else {}
    return body if isinstance(body, dict) else {}


def _completion(answered: Mapping[str, Any]) -> str | tuple[int, ...]:
    """The answer of a line, as text or as token ids."""
    message = answered.get("message") or {}
    if message.get("tool_calls") or message.get("reasoning_content"):
        raise _LeftOut("no plain text")
    completion: Any = None
    for name in ("token_ids", "completion_token_ids", "completion", "text", "response"):
        completion = completion or answered.get(name)
    completion = completion or message.get("content")
    if isinstance(completion, list):
        return tuple(completion)
    if not isinstance(completion, str):
        raise _LeftOut("no answer")
    return completion


def _sampling(own: DecodingSettings, asked: Mapping[str, Any]) -> Sampling:
    if not isinstance(asked.get("temperature"), int | float):
        raise _LeftOut("no temperature")
    others = [name for name in _OTHERS if asked.get(name)]
    if others:
        raise _LeftOut(others[0])
    given = {name: asked[name] for name in _DECODING if asked.get(name) is not None}
    # Some APIs say -1 for all.
    given["top_k"] = max(0, given.get("top_k", 0))
    given = {"top_p": 1.0} | given
    decoding = dataclasses.replace(own, **given)
    parameters = {
        name: asked[name]
        for name, idle in _PARAMETERS.items()
        if asked.get(name) not in (None, idle)
    }
    every = {"temperature": decoding.temperature, "top_p": decoding.top_p, "top_k": decoding.top_k}
    plain = {"top_p": 1.0, "top_k": 0}
    shown = {name: value for name, value in every.items() if value != plain.get(name)} | parameters
    name = " ".join(f"{name}={value}" for name, value in shown.items())
    return Sampling(name, decoding, parameters)


def _without_ends(answers: Sequence[Answer], ends: Sequence[int]) -> list[Answer]:
    """Answers without the tokens that end them, and judged as such; none of one that has no other token."""
    shortened = []
    for answer in answers:
        tokens = list(answer.record.token_ids)
        while tokens and tokens[-1] in ends:
            tokens.pop()
        if not tokens:
            continue
        request = answer.request
        if not request.is_greedy:
            sampling = dataclasses.replace(request.sampling, left_out=tuple(ends))
            request = dataclasses.replace(request, sampling=sampling)
        # Tokens are read from a text as well as can be.
        record = dataclasses.replace(
            answer.record, token_ids=tokens, num_tokens=len(tokens), from_text=False
        )
        shortened.append(Answer(dataclasses.replace(request, num_tokens=len(tokens)), record))
    return shortened
