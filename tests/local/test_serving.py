"""The service: every answer is what it is alone, and work fails with its reason."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from chains import RAGGED, SIZE, chain, decoded, texts
from fakes import MarkovRunner
from harness.config.errors import RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.engines.door.serving import ENDING, Piece, Refusal, TokenLogprob
from harness.engines.protocol import Engine, Request, in_batches
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest
from harness.local.decoding.protocols import NonFiniteError, Step
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.serving import LocalService, ServedAnswer


class Table(MarkovRunner):
    """A table that rows may join."""

    def add(self, prompts: Sequence[Sequence[int]]) -> Step:
        assert self._num_extended == 0
        self.rows += [list(prompt) for prompt in prompts]
        return Step(self._logits[torch.tensor([prompt[-1] if prompt else 0 for prompt in prompts])])


class TableArm:
    """An arm of tables, with as many draft tokens as given. With `gate`, each loop waits for it to begin."""

    def __init__(self, name: str, num_draft_tokens: int, transitions: Tensor | None = None) -> None:
        self.name = name
        self._number = num_draft_tokens
        self._transitions = chain(0) if transitions is None else transitions
        self.has_begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def loop_request(self, request: Request) -> RowRequest:
        decoding = request.decoding
        most = decoding.max_new_tokens
        numbers = uniforms(request.seed, request.index, most + 1)
        warp = Warp(decoding.temperature)
        return RowRequest(request.prompt, numbers, warp, most, request.stop_tokens)

    @contextmanager
    def explained(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            raise RunError(str(error)) from error

    def loop(self, first: Request) -> Loop:
        self.has_begun.set()
        assert self.gate.wait(60)
        target = Table(self._transitions)
        if not self._number:
            return Loop(Calls(target))
        warp = BatchWarp()
        drafter = ModelDrafter(Table(0.5 * chain(0) + 0.5 * chain(1)), warp)
        return Loop(Calls(target, drafter, self._number, warp=warp))

    def logprobs(self, *_: Any) -> list[Any]:
        return []

    def prompt_logprobs(self, prompt: Sequence[int], num_top: int) -> list[Any]:
        raise RuntimeError("no room for logits of a long prompt")

    def alone(self, request: Request) -> list[int]:
        return texts(decoded(self.loop(request), [self.loop_request(request)]), 1)[0]


class Client:
    """Waits for the last piece of its answer, or leaves after some."""

    def __init__(
        self,
        service: LocalService,
        arm: str,
        request: Request,
        most: int = 1000,
        num_prompt_logprobs: int | None = None,
    ) -> None:
        self.ended = threading.Event()
        self.last: Piece | None = None
        self._most = most
        self._service = service
        self.answer: ServedAnswer | None = None
        [self.answer] = service.ask(
            arm, [request], self.put, num_prompt_logprobs=num_prompt_logprobs
        )

    def put(self, piece: Piece) -> None:
        if self.answer is not None and len(self.answer.token_ids) >= self._most:
            self.answer.cancelled = True
            self.ended.set()
        if piece.finish_reason is not None:
            self.last = piece
            self.num_running_then = self._service.num_running
            self.ended.set()

    def tokens(self) -> list[int]:
        assert self.ended.wait(60)
        return self.answer.token_ids


def request(
    index: int, length: int = 12, stop: Sequence[int] = (), first: int | None = None
) -> Request:
    prompt = RAGGED[index % len(RAGGED)] if first is None else [first]
    decoding = DecodingSettings(max_new_tokens=length, temperature=0.9 if first is None else 0.0)
    return Request(prompt, decoding, 0, index, frozenset(stop))


@contextmanager
def service_over(*arms: Any, rows: int = 3, waiting: int = 20) -> Iterator[LocalService]:
    engine: Any = SimpleNamespace(arms=arms)
    tokenizer: Any = Characters()
    service = LocalService(lambda: engine, tokenizer, rows, waiting)
    try:
        yield service
    finally:
        service.close()
        service.close()  # a second time changes nothing


def test_answers_that_join_and_leave_are_what_they_are_alone() -> None:
    """Of both arms, with stop tokens, and some whose clients leave."""
    arms = {"regular": TableArm("regular", 0), "speculative": TableArm("speculative", 3)}
    with service_over(*arms.values()) as service:
        clients = []
        for index in range(20):
            name = "regular" if index % 7 < 3 else "speculative"
            asked = request(index, 12 + 5 * (index % 4), [[], [8]][index % 2])
            clients.append(
                (name, asked, Client(service, name, asked, 9 if index % 3 == 0 else 1000))
            )
        for name, asked, client in clients:
            whole = arms[name].alone(asked)
            tokens = client.tokens()
            assert tokens == whole[: len(tokens)]
            if client.last is not None:
                assert client.last.finish_reason in ("stop", "length")
                assert len(tokens) == len(whole)
    assert service.num_running == 0


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_numbers_that_overflow_fail_their_answer_alone(num_draft_tokens: int) -> None:
    """Each token is followed by the next one; behind 3 the model has no numbers."""
    transitions = torch.eye(SIZE).roll(1, dims=1)
    transitions[3] = torch.nan
    arm = TableArm("speculative", num_draft_tokens, transitions)
    arm.gate.clear()
    with service_over(arm) as service:
        first = Client(service, "speculative", request(1, 4, first=5))
        assert arm.has_begun.wait(60)
        broken = Client(service, "speculative", request(0, first=0))
        beside = Client(service, "speculative", request(1, 7, first=5))
        arm.gate.set()
        broken.tokens()
        assert broken.last.finish_reason == "error"
        assert "not finite" in broken.last.text
        assert first.tokens() == [6, 7, 8, 9]
        assert beside.tokens() == [6, 7, 8, 9, 10, 11, 0]
        later = Client(service, "speculative", request(1, 4, first=5))
        assert later.tokens() == [6, 7, 8, 9]
        assert later.num_running_then == 0, "what its client asks next runs beside nothing"


def test_a_prompt_that_cannot_be_read_fails_its_answer_alone() -> None:
    """One runs, and one joins together with it."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm) as service:
        runs = Client(service, "regular", request(0))
        assert arm.has_begun.wait(60)
        joins = Client(service, "regular", request(1))
        scored = Client(service, "regular", request(2), num_prompt_logprobs=1)
        arm.gate.set()
        assert scored.tokens() == []
        assert (scored.last.finish_reason, "no room" in scored.last.text) == ("error", True)
        for index, client in enumerate([runs, joins]):
            assert client.tokens() == arm.alone(request(index))


def test_an_answer_that_nobody_waits_for_holds_up_nobody() -> None:
    """It would run in the other arm, and is first in the queue. It takes no room there, either."""
    arms = [TableArm("regular", 0), TableArm("speculative", 3)]
    arms[0].gate.clear()
    with service_over(*arms, rows=2, waiting=1) as service:
        runs = Client(service, "regular", request(0, 100_000))
        assert arms[0].has_begun.wait(60)
        for _ in range(3):
            gone = Client(service, "speculative", request(1), most=0)
            gone.answer.cancelled = True
        behind = Client(service, "regular", request(2))
        arms[0].gate.set()
        assert len(behind.tokens()) == 12
        assert not runs.ended.is_set()
        runs.answer.cancelled = True


def test_no_more_wait_than_may_wait_beyond_those_that_run() -> None:
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, rows=2, waiting=1) as service:
        running = [Client(service, "regular", request(0))]
        assert arm.has_begun.wait(60)
        running += [Client(service, "regular", request(index)) for index in (1, 2)]
        for ask in (lambda: Client(service, "regular", request(0)), lambda: service.alone(id)):
            with pytest.raises(Refusal, match="at most 1 may wait") as refused:
                ask()
            assert refused.value.status == 429
        arm.gate.set()
        assert [len(client.tokens()) for client in running] == [12, 12, 12]


def test_work_runs_while_no_answer_is_generated() -> None:
    """After those that run, and before those that came later."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, rows=2, waiting=2) as service:
        first = Client(service, "regular", request(0))
        assert arm.has_begun.wait(60)
        work = service.alone(lambda engine: [service.num_running, first.ended.is_set()])
        later = Client(service, "regular", request(1))
        arm.gate.set()
        assert work.result(60) == [0, True]
        assert len(later.tokens()) == 12


def test_work_that_fails_is_refused_with_its_reason_and_the_service_goes_on() -> None:
    def leave(_: Engine) -> None:
        raise Refusal(499, "the client went away")

    def fail(_: Engine) -> None:
        raise ValueError("two\nlines")

    with service_over(rows=1, waiting=1) as service:
        with pytest.raises(Refusal, match="went away") as left:
            service.alone(leave).result()
        with pytest.raises(Refusal, match="ValueError: two") as failed:
            service.alone(fail).result()
        assert (left.value.status, failed.value.status) == (499, 500)
        assert "\n" not in str(failed.value)
        assert service.alone(lambda opened: opened).result().arms == ()
    assert not service.is_running()
    with pytest.raises(Refusal, match="ending") as late:
        service.alone(leave)
    assert late.value.status == 503


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_what_runs_and_what_waits_fails_when_the_service_ends(grace_s: float) -> None:
    """What runs has time to end; what waits, and work, has none."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, rows=1, waiting=2) as service:
        runs = Client(service, "regular", request(0))
        assert arm.has_begun.wait(60)
        waits = Client(service, "regular", request(1))
        work = service.alone(lambda engine: None)
        closing = threading.Thread(target=service.close, args=[grace_s])
        closing.start()
        assert waits.tokens() == []
        if not grace_s:
            runs.tokens()
        arm.gate.set()
        closing.join()
        with pytest.raises(Refusal, match=ENDING):
            work.result(60)
        assert (waits.last.finish_reason, waits.last.text) == ("error", ENDING)
        if grace_s:
            assert (runs.last.finish_reason, len(runs.tokens())) == ("length", 12)


def test_an_engine_that_does_not_open_says_why_and_leaves_no_thread() -> None:
    def refuse() -> Engine:
        raise SettingError("runner", "needs a GPU", "compiled")

    before = set(threading.enumerate())
    tokenizer: Any = Characters()
    with pytest.raises(SettingError, match="needs a GPU"):
        LocalService(refuse, tokenizer, max_rows=1, max_waiting=1)
    assert set(threading.enumerate()) <= before


# One answer -----------------------------------------------------------------------------------------------------------

END_OF_TEXT = 3


class Characters:
    """A token is a letter; the one that ends a text gives none."""

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(chr(token) for token in tokens if token != END_OF_TEXT)


def answer(most: int = 100, **fields: Any) -> ServedAnswer:
    decoding = DecodingSettings(max_new_tokens=most)
    request = Request(ids("prompt"), decoding, 7, 0, frozenset([END_OF_TEXT]))
    tokenizer: Any = Characters()
    arm: Any = SimpleNamespace()
    return ServedAnswer(arm, request, tokenizer, lambda piece: None, **fields)


def ids(text: str) -> list[int]:
    return list(map(ord, text))


@pytest.mark.parametrize(
    ("bursts", "shown"),
    [
        pytest.param(["the E", "ND of"], ["the ", ""], id="in two bursts"),
        pytest.param(["the E", "N", "Ds"], ["the ", "", ""], id="in three"),
        pytest.param(["a", "END"], ["a", ""], id="in one burst"),
        pytest.param(["no EN, but END"], ["no EN, but "], id="after its own beginning"),
        pytest.param(["EEN", "D"], ["E", ""], id="behind a false beginning"),
        pytest.param(["of STOP, END"], ["of "], id="the first of two"),
    ],
)
def test_a_stop_text_ends_the_answer_and_is_never_shown(
    bursts: list[str], shown: list[str]
) -> None:
    growing = answer(stops=["END", "STOP"])
    pieces = [growing.take(ids(burst), 0, 0) for burst in bursts]
    assert [piece.text for piece in pieces] == shown
    assert [piece.finish_reason for piece in pieces] == [*[None] * len(bursts[1:]), "stop"]


@pytest.mark.parametrize("stops", [["abb", "b"], ["bab", "a"], ["aab", "ab", "b"]])
def test_where_stop_texts_overlap_the_one_that_ends_first_counts(stops: list[str]) -> None:
    """However many tokens an iteration brought: so the texts of both arms are the same."""
    for letters in itertools.product("abc", repeat=5):
        texts = set()
        for width in (1, 2, 5):
            growing = answer(stops=stops)
            text = ""
            for burst in in_batches(letters, width):
                piece = growing.take(ids("".join(burst)), 0, 0)
                text += piece.text
                if piece.finish_reason:
                    break
            texts.add((text, piece.finish_reason))
        assert len(texts) == 1, (letters, texts)


def test_what_only_began_like_a_stop_text_is_shown() -> None:
    growing = answer(most=6, stops=["END"])
    pieces = [growing.take(ids(burst), 0, 0) for burst in ("aE", "Nb", "EN")]
    assert [piece.text for piece in pieces] == ["a", "ENb", "EN"]
    assert pieces[-1].finish_reason == "length"


def test_a_stop_token_ends_it_before_its_length_does() -> None:
    piece = answer(most=3).take([*ids("ab"), END_OF_TEXT], 0, 0)
    assert piece == Piece(0, "ab", [*ids("ab"), END_OF_TEXT], "stop", [])


def test_scored_tokens_begin_where_their_text_does() -> None:
    """Counted from the beginning of the answer, in bursts of which only some tokens are scored."""
    growing = answer(choice=2)
    pieces = [growing.take(ids("abc"), 0, 0)]
    logprobs = [TokenLogprob(place, ord("x"), -1.0, 1, []) for place in (0, 2)]
    pieces.append(growing.take(ids("xyx"), 0, 0, logprobs))
    assert [scored.offset for scored in pieces[1].scored] == [3, 5]
    assert [scored.logprob for scored in pieces[1].scored] == logprobs
    assert {piece.choice for piece in pieces} == {2}
    assert [piece.text for piece in pieces] == ["abc", "xyx"], (
        "nothing is held back without stop texts"
    )


def test_outcomes_are_of_iterations_that_drafted() -> None:
    growing = answer()
    growing.take(ids("a"), 0, 0)
    growing.take(ids("b"), 4, 0)
    growing.take(ids("bc"), 4, 1)
    # All of the draft's tokens that the text has: it ends within them.
    growing.take(ids("de"), 4, 3)
    assert growing.outcomes == [(4, 0), (4, 1), (1, 1)]
