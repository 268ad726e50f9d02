"""What follows from the records of requests and answers: times, failures, text that grows, and where it parts."""

import gc
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from fakes import MarkovRunner
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.engines.arrivals import Origin, origins
from harness.engines.counts import Counts, DraftCounts, added
from harness.engines.divergence import Divergence, first_divergence, text_divergence
from harness.engines.door.plans import Machine, PassBytes
from harness.engines.door.reading import Margin, num_together
from harness.engines.protocol import Answered, Arm, BatchTimes, Engine, Request, in_batches
from harness.engines.record import Preparation
from harness.engines.requests import RequestError, RequestRecord
from harness.engines.timing import timed_answer
from harness.engines.tokenizer import Detokenizer, TextTokenizer, prompt_text
from some_questions import question_of
from tiny_checkpoints import make_tokenizer


def record(**known: Any) -> RequestRecord:
    return RequestRecord(0, 3, **known)


def test_tokens_that_arrive_together_are_one_burst() -> None:
    """Four tokens after the first take 400 ms, so that arrivals within 10 ms belong together."""
    times = record(arrivals=[0.5, 0.509, 0.7, 0.711, 0.9], seconds=1.2, num_tokens=5)
    assert times.time_to_first_token_ms == 500
    assert times.time_per_output_token_ms == pytest.approx(100)
    assert times.bursts == [0.5, 0.7, 0.711, 0.9]
    assert times.inter_token_latencies_ms == pytest.approx([200, 11, 189])
    assert record(arrivals=[0.5], num_tokens=2).time_per_output_token_ms is None
    assert record(arrivals=[0.5, 0.7], num_tokens=1).time_per_output_token_ms is None
    assert record(arrivals=[0.5, 0.7], num_tokens=2).time_per_output_token_ms is not None
    nothing = record()
    assert (nothing.time_to_first_token_ms, nothing.bursts) == (None, [])


# Three iterations drafted something.
HISTOGRAM = DraftCounts(accepted=4, drafting=3, accepted_at=[2, 2])


def test_iterations_follow_from_what_is_reported() -> None:
    for known, num_iterations in [
        ({"outcomes": [(4, 2), (3, 3)], "num_tokens": 9}, 2),
        ({"num_tokens": 9}, 8),
        ({}, 0),
        # Totals, of answers with all tokens that were asked for.
        ({"drafts": DraftCounts(proposed=8, accepted=5), "num_tokens": 9, "max_new_tokens": 9}, 3),
        ({"drafts": DraftCounts(proposed=8, accepted=5), "num_tokens": 9, "max_new_tokens": 10}, None),
        ({"drafts": DraftCounts(proposed=8, accepted=7), "num_tokens": 9, "max_new_tokens": 9}, 1),
        ({"drafts": DraftCounts(proposed=8, accepted=8), "num_tokens": 9, "max_new_tokens": 9}, None),
        ({"drafts": HISTOGRAM, "num_tokens": 9}, 4),
        ({"drafts": HISTOGRAM, "num_tokens": 6}, 3),
    ]:  # fmt: skip
        request = record(**known)
        assert request.num_iterations == num_iterations


@pytest.mark.parametrize(("num_tokens", "num_undrafted"), [(3, 0), (4, 0), (5, 1), (7, 3)])
def test_iterations_without_drafts_are_added(num_tokens: int, num_undrafted: int) -> None:
    """The first token comes with the prompt, three more with the iteration that is reported."""
    request = record(outcomes=[(4, 2)], num_tokens=num_tokens)
    request.count_undrafted()
    assert request.outcomes == [(4, 2), *[(0, 0)] * num_undrafted]
    assert request.outcomes_in_order == (num_undrafted == 0)


def test_a_request_is_left_answered_cancelled_or_failed() -> None:
    assert record(token_ids=[1, 2], arrivals=[0.1], leave_after=2).has_enough
    assert record(arrivals=[0.1, 0.2], leave_after=2).has_enough
    assert not record(token_ids=[1], arrivals=[0.1], leave_after=2).has_enough
    assert not record(token_ids=[1, 2]).has_enough
    errors = [RequestError(code, "bad") for code in (499, 500)]
    cancelled, failed = (record(num_tokens=1, error=error) for error in errors)
    answered = [each.answered for each in (record(num_tokens=1), record(), failed)]
    assert answered == [True, False, False]
    assert [each.was_left for each in (cancelled, failed, record())] == [True, False, False]
    assert str(failed.error) == "bad"


def records(*num_tokens: int) -> list[RequestRecord]:
    """Requests 3, 4, ..., which took half a second each."""
    return [
        RequestRecord(3 + place, 1, seconds=0.5, num_tokens=number)
        for place, number in enumerate(num_tokens)
    ]


def test_a_batch_has_one_time_and_requests_that_were_sent_have_their_own() -> None:
    batch = Answered(requests=records(6, 4), seconds=2.0, batch=BatchTimes(0.5, 4))
    assert batch.ms_per_token == 400
    assert not batch.has_request_times
    nothing = Answered(requests=records(0), seconds=2.0, batch=BatchTimes(2.0, 0))
    assert math.isnan(nothing.ms_per_token)
    sent = Answered(requests=records(6, 4, 0, 5), seconds=2.0)
    assert sent.has_request_times
    assert list(map(list, in_batches([1, 2, 3], 2))) == [[1, 2], [3]]


def test_a_plan_counts_slots_bytes_and_gpus() -> None:
    decoding = DecodingSettings(max_new_tokens=10, num_draft_tokens=3)
    preparation = Preparation(decoding=decoding, longest_prompt=20)
    assert preparation.demand.slots == 20 + 10 + 3 + 1
    passes = PassBytes(step=100, verification=120, drafting=40)
    assert passes.iteration_steps == 1.6
    assert Machine({0: 1, 1: 1, "cpu": 1}, "two", {}).num_gpus == 2
    assert [num_together(longest) for longest in (1, 2048, 4096, 20_000)] == [8, 8, 4, 1]


def test_tokens_of_an_iteration_come_from_draft_and_target() -> None:
    drafted = [Origin.DRAFT] * 2
    assert origins(0, 0, 1) == [Origin.TARGET]
    assert origins(4, 2, 3) == [*drafted, Origin.RECOVERED]
    assert origins(2, 2, 3) == [*drafted, Origin.BONUS]
    assert origins(4, 2, 1) == [Origin.DRAFT]


def test_counters_are_added_by_position() -> None:
    first = Counts(generated=3, accepted_at={0: 1}, running=5)
    both = added(first, Counts(drafts=2, accepted_at={0: 2, 1: 4}, running=7))
    assert both == Counts(generated=3, drafts=2, accepted_at={0: 3, 1: 4}, running=5)


TEXT = "naïve 漢字 👩\u200d🚀 שלום\n end"


@pytest.mark.parametrize("prompt", ["a prompt", "漢字", ""])
def test_pieces_add_up_to_the_text(prompt: str) -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer(prompt)["input_ids"])
    pieces = [detokenizer.add(token) for token in tokenizer(TEXT)["input_ids"]]
    assert "".join(piece or "" for piece in pieces) == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in (piece or "") for piece in pieces)
    # One token is a byte here: 漢 has three and is there with the last.
    at = TEXT.encode().index("漢".encode())
    assert pieces[at : at + 3] == [None, None, "漢"]


def test_half_a_character_is_shown_when_nothing_follows_and_a_special_token_never() -> None:
    tokenizer = make_tokenizer()
    detokenizer = Detokenizer(tokenizer, [])
    first, second, _ = tokenizer("漢")["input_ids"]
    assert detokenizer.add(first) is None
    assert detokenizer.add(second) is None
    assert detokenizer.flush() == "\N{REPLACEMENT CHARACTER}"
    assert detokenizer.flush() == ""
    detokenizer = Detokenizer(tokenizer, tokenizer("a")["input_ids"])
    assert detokenizer.add(tokenizer.eos_token_id) == ""


@pytest.fixture(scope="module")
def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer as Llama 1 and 2 have it: characters that it lacks become tokens of single bytes."""
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "▁", "a", "b"]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("prompt", ["ab", "龘龗", "a龘龗龖", "👩👩👩"])
def test_characters_of_single_bytes_stay_whole_in_a_row(
    byte_fallback: PreTrainedTokenizerFast, prompt: str
) -> None:
    text = "龘龗龖龕龔龓a👨\u200d👩\u200d👧\u200d👦b"
    detokenizer = Detokenizer(byte_fallback, byte_fallback(prompt)["input_ids"])
    pieces = [detokenizer.add(token) for token in byte_fallback(text)["input_ids"]]
    assert "".join(piece or "" for piece in pieces) == text


@pytest.mark.parametrize("text", ["", "a", "Once upon a time", "\0\0", "für 3 €, 你好 🙂"])
def test_text_comes_back(text: str) -> None:
    tokenizer = TextTokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert len(ids) == -(-len(text.encode()) // 4)
    assert tokenizer.decode([0, 7, 151_643]) is not None, "ids of a server"


def test_the_text_of_a_prompt_keeps_its_spaces() -> None:
    """Tokenizers such as Llama 3's ask transformers to take some of them out."""
    tokenizer = make_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    text = "it is n't , is it ?"
    assert prompt_text(tokenizer, tokenizer(text)["input_ids"]) == text
    # Some templates begin with the token, although the tokenizer does not.
    assert prompt_text(tokenizer, tokenizer("<s>a")["input_ids"]) == "<s>a"
    begins = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.backend_tokenizer.post_processor = begins
    assert prompt_text(tokenizer, tokenizer("a")["input_ids"]) == "a"


QUESTION = question_of([[1], [2]], DecodingSettings(max_new_tokens=3))


class FakeArm(Arm):
    """Each answer is one token; `during` is called meanwhile."""

    name = "any"

    def __init__(self, during: Callable[[], None] = lambda: None) -> None:
        self.during = during
        self.error: RequestError | None = None
        self.asked = (0, 0)

    def answer(
        self, requests: Sequence[Request], in_flight: int, extra: Sequence[Request] = (), *_: Any
    ) -> Answered:
        self.during()
        self.asked = in_flight, len(extra)
        records = [request.record() for request in requests]
        for record in records:
            record.add([7], 0.5)
        records[-1].error = self.error
        return Answered(requests=records, seconds=in_flight)


class FakeWeights:
    """Models whose calls are noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def reset_peak_memory(self) -> None:
        self.calls.append("reset")

    def peak_memory_bytes(self) -> int:
        self.calls.append("read")
        return 77


def test_memory_is_that_of_one_question() -> None:
    engine: Any = Engine()
    engine.weights = FakeWeights()
    arm = FakeArm(lambda: engine.weights.calls.append("answer"))
    answered = timed_answer(engine, arm, QUESTION)
    assert engine.weights.calls == ["reset", "answer", "read"]
    assert answered.peak_memory_bytes == 77
    assert (answered.arm, answered.question, answered.tokens) == ("any", QUESTION, [[7], [7]])


def test_a_failed_request_is_an_error_where_none_may_fail() -> None:
    arm = FakeArm()
    arm.error = RequestError(500, "out of memory")
    with pytest.raises(RunError, match="any: 1 of 2 requests failed: out of memory"):
        timed_answer(Engine(), arm, QUESTION)
    answered = timed_answer(Engine(), arm, QUESTION, allow_failures=True)
    assert [record.error for record in answered.requests] == [None, arm.error]


def test_garbage_is_collected_outside_the_clock() -> None:
    seen = []
    for begin in (gc.disable, gc.enable):
        begin()
        was_enabled = gc.isenabled()
        timed_answer(Engine(), FakeArm(lambda: seen.append(gc.isenabled())), QUESTION)
        assert gc.isenabled() == was_enabled
    assert seen == [False, False]


def test_prompts_are_in_flight_all_at_once_unless_a_question_says_otherwise() -> None:
    arm = FakeArm()
    kept_up = replace(QUESTION, in_flight=1, extra=QUESTION.requests[:1])
    for question, asked in ((QUESTION, (2, 0)), (kept_up, (1, 1))):
        timed_answer(Engine(), arm, question)
        assert arm.asked == asked


ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def test_every_name_of_the_seam_is_drawn() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    _, section = text.split("**An engine answers a question", 1)
    drawing = section.split("```")[1]
    for name, kind in (("engine", Engine), ("arm", Arm)):
        names = vars(kind).keys() | kind.__annotations__
        public = {word for word in names if not word.startswith("_")}
        assert set(re.findall(rf"\b{name}\.(\w+)", drawing)) == public


CHAIN = torch.tensor([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])


class FakeEngine:
    vocabulary_size = 3

    def margin(self, token_ids: list[int], wanted: int, other: int) -> Margin:
        logits = MarkovRunner(CHAIN).start([token_ids]).logits[0]
        return Margin(float(logits[wanted] - logits[other]), 0.25)


ENGINE: Any = FakeEngine()


def test_the_first_difference_comes_with_its_margin_and_a_foreign_token_is_an_error() -> None:
    found = first_divergence(ENGINE, [0], [1, 2, 0, 1], [1, 2, 1, 2])
    assert found.position == 2
    assert found.logit_margin == pytest.approx(torch.tensor(0.5 / 0.25).log().item())
    assert found.logit_tolerance == 0.25
    assert found.excess == pytest.approx(math.log(2) / 0.25)
    assert Divergence(2, -0.5, 0.25).excess == 2
    assert Divergence(2).excess == math.inf
    assert first_divergence(ENGINE, [0], [1, 2], [1]) == Divergence(1)
    assert first_divergence(ENGINE, [0], [1, 2], [1, 2]) is None
    assert first_divergence(None, [0], [1, 2, 0], [1, 1, 0]) == Divergence(1), "no reference"
    for expected, actual in (([1, 3], [1, 0]), ([1, 0], [1, 3])):
        with pytest.raises(RunError, match="token 3 is not in the model's vocabulary of 3 tokens"):
            first_divergence(ENGINE, [0], expected, actual)


TOKENIZER = make_tokenizer((" the",))
PROMPT = TOKENIZER.encode("a")


class Writer:
    """A reference over single bytes, which greedily writes a text and would rather write `x` than anything else."""

    def __init__(self, text: str) -> None:
        self._tokens = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id]
        self.num_calls = 0

    def logits_along(self, prompts: list[list[int]], texts: list[list[int]]) -> np.ndarray:
        self.num_calls += 1
        [prompt], [text] = prompts, texts
        logits = np.zeros((1, len(text), len(TOKENIZER)))
        logits[:, :, TOKENIZER.encode("x")] = 1.0
        for index in range(len(text)):
            place = min(len(prompt) + index - len(PROMPT), len(self._tokens) - 1)
            logits[0, index, self._tokens[place]] = 3.0
        return logits

    def margin(self, token_ids: list[int], wanted: int, other: int) -> Margin:
        [[logits]] = self.logits_along([token_ids], [[0]])
        return Margin(float(logits[wanted] - logits[other]), 0.25)


def parted(own: str, text: str, num_tokens: int = 9) -> Divergence | None:
    return text_divergence(Writer(own), TOKENIZER, PROMPT, text, num_tokens)


@pytest.mark.parametrize(
    ("text", "num_tokens"),
    [("bcdé", 9), ("bcdé", 5), ("bcd", 4), ("bcd\ufffd", 4), ("bc", 2), ("", 0)],
)
def test_a_text_is_the_references_own_as_far_as_it_goes(text: str, num_tokens: int) -> None:
    """The last character is two tokens. Its first byte alone is no text, or a mark of some servers."""
    assert parted("bcdé", text, num_tokens) is None


def test_a_text_parts_from_the_references_own_with_a_margin() -> None:
    """Or without one, where it ends although the reference goes on, or if the reference begins a longer character."""
    assert [parted("bcdé", ""), parted("bcdé", "bc", 3)] == [Divergence(0), Divergence(2)]
    assert parted("bcé", "bcx") == Divergence(3)
    assert parted("bcdé", "bcxé") == Divergence(2, 2.0, 0.25)
    assert parted("bcdé", "bczé") == Divergence(2, 3.0, 0.25)
    # The reference writes ` the` as one token, of which a server's text has the beginning.
    assert parted("b the", "b t", 2) == Divergence(1, 3.0, 0.25)


def test_a_text_is_read_once_and_again_where_the_reference_cuts_it_otherwise() -> None:
    writer: Any = Writer("b" * 30)
    assert text_divergence(writer, TOKENIZER, PROMPT, "b" * 30, 30) is None
    assert writer.num_calls == 1
    bytes_alone: Any = Writer("b")
    bytes_alone._tokens = [token for letter in "b the" for token in TOKENIZER.encode(letter)]
    assert text_divergence(bytes_alone, TOKENIZER, PROMPT, "b the", 5) is None
    assert bytes_alone.num_calls == 2


@pytest.mark.parametrize("text", ["bcz", "bcxz"])
def test_behind_the_end_of_a_text_no_margin_is_told(text: str) -> None:
    """A server may keep the model from ending, and goes on in its own way then."""
    assert parted("bc", "bc") is None
    found = parted("bc", text)
    assert found.logit_margin is None
