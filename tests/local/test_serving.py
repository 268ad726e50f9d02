"""The service: every answer is what it is alone, and work fails with its reason."""

import itertools
import threading
import time
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
from harness.engines.door.serving import ENDING, Piece, Refusal
from harness.engines.protocol import Engine, Request, in_batches
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest, RowStep
from harness.local.decoding.protocols import NonFiniteError
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.serving import LocalService, ServedAnswer


class TableArm:
    """An arm of tables, with as many draft tokens as given. With `gate`, each loop waits for it to begin."""

    def __init__(self, name: str, num_draft_tokens: int, transitions: Tensor | None = None) -> None:
        self.name = name
        self._number = num_draft_tokens
        self._transitions = chain(0) if transitions is None else transitions
        self.has_begun = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None

    def _asked(self, request: Request) -> RowRequest:
        decoding = request.decoding
        most = decoding.max_new_tokens
        numbers = uniforms(request.seed, request.index, most + 1)
        warp = Warp(decoding.temperature)
        return RowRequest(request.prompt, numbers, warp, most, request.stop_tokens)

    @contextmanager
    def explained(self, requests: Sequence[Request]) -> Iterator[None]:
        try:
            yield
        except NonFiniteError as error:
            raise RunError(str(error)) from error

    def begin(self, requests: Sequence[Request]) -> tuple[Loop, list[RowStep]]:
        self.has_begun.set()
        assert self.gate.wait(60)
        if self.failure is not None:
            raise self.failure
        loop = self._loop()
        return loop, loop.start(list(map(self._asked, requests)))

    def _loop(self) -> Loop:
        target = MarkovRunner(self._transitions)
        if not self._number:
            return Loop(Calls(target))
        warp = BatchWarp()
        drafter = ModelDrafter(MarkovRunner(0.5 * chain(0) + 0.5 * chain(1)), warp)
        return Loop(Calls(target, drafter, self._number, warp=warp))

    def alone(self, request: Request) -> list[int]:
        return texts(decoded(self._loop(), [self._asked(request)]), 1)[0]


class Client:
    """Waits for the last piece of its answer, or leaves after some."""

    def __init__(self, service: LocalService, arm: str, request: Request, most: int = 1000) -> None:
        self.ended = threading.Event()
        self.last: Piece | Refusal | None = None
        self._most = most
        self.answer: ServedAnswer | None = None
        [self.answer] = service.ask(arm, [request], self.put)

    def put(self, piece: Piece | Refusal) -> None:
        if self.answer is not None and len(self.answer.token_ids) >= self._most:
            self.answer.cancel()
            self.ended.set()
        if isinstance(piece, Refusal) or piece.finish_reason is not None:
            self.last = piece
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
def service_over(*arms: Any, waiting: int = 20) -> Iterator[LocalService]:
    engine: Any = SimpleNamespace(arms=arms)
    tokenizer: Any = Characters()
    service = LocalService(lambda: engine, tokenizer, waiting)
    try:
        yield service
    finally:
        service.close()
        service.close()  # a second time changes nothing


def test_answers_are_what_they_are_alone() -> None:
    """Of both arms, with stop tokens, and some whose clients leave."""
    arms = {"regular": TableArm("regular", 0), "speculative": TableArm("speculative", 3)}
    with service_over(*arms.values()) as service:
        clients = []
        for index in range(20):
            name = "regular" if index % 7 < 3 else "speculative"
            asked = request(index, 12 + 5 * (index % 4), [[], [8]][index % 2])
            patience = 9 if index % 3 == 0 else 1000
            clients.append((name, asked, Client(service, name, asked, patience)))
        for name, asked, client in clients:
            whole = arms[name].alone(asked)
            tokens = client.tokens()
            assert tokens == whole[: len(tokens)]
            if client.last is not None:
                assert client.last.finish_reason in ("stop", "length")
                assert len(tokens) == len(whole)


def test_numbers_that_overflow_fail_their_answer_and_the_next_one_is_right() -> None:
    """Each token is followed by the next one; behind 3 the model has no numbers."""
    transitions = torch.eye(SIZE).roll(1, dims=1)
    transitions[3] = torch.nan
    with service_over(TableArm("speculative", 3, transitions)) as service:
        broken = Client(service, "speculative", request(0, first=0))
        later = Client(service, "speculative", request(1, 4, first=5))
        broken.tokens()
        assert broken.last.status == 500
        assert "not finite" in str(broken.last)
        assert later.tokens() == [6, 7, 8, 9]


def test_an_answer_that_nobody_waits_for_holds_up_nobody() -> None:
    """Neither one that runs nor those in the queue, where they take no room."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, waiting=1) as service:
        runs = Client(service, "regular", request(0, 100_000))
        assert arm.has_begun.wait(60)
        for _ in range(3):
            Client(service, "regular", request(1, 100_000)).answer.cancel()
        behind = Client(service, "regular", request(2))
        arm.gate.set()
        runs.answer.cancel()
        assert behind.tokens() == arm.alone(request(2))
        assert 0 < len(runs.answer.token_ids) < 100_000


def test_others_wait_in_order_and_no_more_than_may_wait() -> None:
    """Several prompts of a request have room together, or none has."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, waiting=2) as service:
        clients = [Client(service, "regular", request(0))]
        assert arm.has_begun.wait(60)
        clients.append(Client(service, "regular", request(1)))
        with pytest.raises(Refusal, match="at most 2 may wait") as refused:
            service.ask("regular", [request(2)] * 2, print)
        assert refused.value.status == 429
        clients.append(Client(service, "regular", request(2)))
        arm.gate.set()
        clients[2].tokens()
        assert all(client.ended.is_set() for client in clients)


def test_an_answer_that_fails_gives_its_reason_and_the_service_goes_on() -> None:
    arm = TableArm("regular", 0)
    with service_over(arm, waiting=1) as service:
        arm.failure = ValueError("two\nlines")
        failed = Client(service, "regular", request(0))
        assert failed.tokens() == []
        assert str(failed.last).startswith("ValueError: two")
        assert "\n" not in str(failed.last)
        arm.failure = None
        assert Client(service, "regular", request(0)).tokens() == arm.alone(request(0))
    assert not service.is_running
    assert refusal(service) == 503


@pytest.mark.parametrize("grace_s", [0.0, 60.0])
def test_what_runs_and_what_waits_fails_when_the_service_ends(grace_s: float) -> None:
    """The running answer has time to end; waiting answers have none."""
    arm = TableArm("regular", 0)
    arm.gate.clear()
    with service_over(arm, waiting=1) as service:
        runs = Client(service, "regular", request(0))
        assert arm.has_begun.wait(60)
        waits = Client(service, "regular", request(1))
        closing = threading.Thread(target=service.close, args=[grace_s])
        closing.start()
        while refusal(service) != 503 or (not grace_s and service.is_running):
            time.sleep(0.01)
        arm.gate.set()
        closing.join()
        assert waits.tokens() == []
        assert (waits.last.status, str(waits.last)) == (503, ENDING)
        if grace_s:
            assert (runs.last.finish_reason, len(runs.tokens())) == ("length", 12)
        else:
            assert (runs.last.status, str(runs.last)) == (503, ENDING)


def refusal(service: LocalService) -> int:
    """The status with which a further request is refused; the one that may wait does."""
    with pytest.raises(Refusal) as refused:
        service.ask("regular", [request(9)], print)
    return refused.value.status


def test_an_engine_that_does_not_open_says_why_and_leaves_no_thread() -> None:
    def refuse() -> Engine:
        raise SettingError("runner", "needs a GPU", "compiled")

    before = set(threading.enumerate())
    tokenizer: Any = Characters()
    with pytest.raises(SettingError, match="needs a GPU"):
        LocalService(refuse, tokenizer, max_waiting=1)
    assert set(threading.enumerate()) <= before


class Characters:
    """A token is a letter."""

    def decode(self, tokens: Sequence[int], **options: Any) -> str:
        return "".join(map(chr, tokens))


def answer(**fields: Any) -> ServedAnswer:
    request = Request(ids("prompt"), DecodingSettings(), 7, 0)
    tokenizer: Any = Characters()
    arm: Any = SimpleNamespace()
    return ServedAnswer(arm, request, tokenizer, lambda piece: None, **fields)


def ids(text: str) -> list[int]:
    return list(map(ord, text))


def step(text: str, num_proposed: int = 0, num_accepted: int = 0, **fields: Any) -> RowStep:
    return RowStep(0, ids(text), [0] * num_proposed, num_accepted, **fields)


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
def test_a_stop_text_ends_the_answer_and_is_not_shown(bursts: list[str], shown: list[str]) -> None:
    growing = answer(stops=["END", "STOP"])
    pieces = [growing.take(step(burst)) for burst in bursts]
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
                piece = growing.take(step("".join(burst)))
                text += piece.text
                if piece.finish_reason:
                    break
            texts.add((text, piece.finish_reason))
        assert len(texts) == 1, (letters, texts)


def test_what_only_began_like_a_stop_text_is_shown() -> None:
    growing = answer(stops=["END"])
    pieces = [growing.take(step(burst)) for burst in ("aE", "Nb")]
    pieces.append(growing.take(step("EN", finish_reason="length")))
    assert [piece.text for piece in pieces] == ["a", "ENb", "EN"]
    assert pieces[-1].finish_reason == "length"


def test_outcomes_are_of_iterations_that_drafted() -> None:
    growing = answer()
    growing.take(step("a", 0, 0))
    growing.take(step("b", 4, 0))
    growing.take(step("bc", 4, 1))
    # All of the draft's tokens that the text has: it ends within them.
    growing.take(step("de", 4, 3))
    assert growing.outcomes == [(4, 0), (4, 1), (1, 1)]
