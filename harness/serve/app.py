"""The HTTP side: OpenAI's completions and chats, `/predict`, the race and the results for the page, health, metrics."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.exceptions import HTTPException

from harness import __version__
from harness.config.errors import SettingError
from harness.report.data import figures_of
from harness.serve.answers import Answer, Piece, metrics
from harness.serve.bodies import Chat, Completion, Sampling, Text
from harness.serve.guard import Guard, error_body, error_response, is_loopback
from harness.serve.service import Service

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": HTTPStatus(status).phrase}
    for status in (400, 401, 411, 413, 422, 429, 500, 503)
}


def make_app(service: Service, key: str | None) -> FastAPI:
    """The application; `key` is what requests must bring, None for none."""
    settings, registry = service.settings, CollectorRegistry()
    app = FastAPI(title="harness", docs_url=None, redoc_url=None)
    max_bytes = round(settings.max_body_mb * 1e6)
    app.add_middleware(
        Guard, local=is_loopback(settings.host), key=key, max_bytes=max_bytes, registry=registry
    )
    note = _noting(service, registry)
    # Without a draft there is nothing to choose between.
    app.include_router(_generation(service, service.arms[-1], note))
    app.include_router(
        _generation(service, "regular", note), prefix="/regular", include_in_schema=False
    )

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(Path(__file__).with_name("page.html"))

    @app.get("/health", responses=_ERRORS)
    def health() -> dict[str, str]:
        if not service.scheduler.thread.is_alive():
            raise HTTPException(503, "the service is ending")
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    def show_metrics() -> PlainTextResponse:
        return PlainTextResponse(generate_latest(registry))

    @app.get("/results", responses=_ERRORS)
    def results() -> dict[str, Any]:
        return figures_of([Path(path) for path in settings.reports])

    @app.post("/race", responses=_ERRORS)
    async def race(body: Completion, request: Request) -> dict[str, Any]:
        return await _while_connected(request, asyncio.wrap_future(service.race(body)))

    @app.exception_handler(SettingError)
    async def wrong_setting(request: Request, error: SettingError) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        return error_response(error.status_code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"][1:]) or "body"
        return error_response(
            400 if first["type"] == "json_invalid" else 422, f"{place}: {first['msg']}"
        )

    return app


def _generation(service: Service, arm: str, note: Callable[[Answer], None]) -> APIRouter:
    """The endpoints that generate with one arm."""
    router = APIRouter(responses=_ERRORS)

    async def respond(
        request: Request, body: Sampling, prompts: list[list[int]], chat: bool = False
    ) -> Any:
        queue: asyncio.Queue[Piece] = asyncio.Queue()
        answers = service.ask(arm, prompts, body, queue)
        pieces = _pieces(request, answers, queue, note)
        shape = _Shape(service.name, body, answers, chat)
        if body.stream:
            return StreamingResponse(shape.events(pieces), media_type="text/event-stream")
        return shape.whole([piece async for piece in pieces])

    @router.get("/version")
    def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        about = {
            "id": service.name,
            "object": "model",
            "created": service.started,
            "owned_by": "harness",
        }
        return {"object": "list", "data": [about | service.about()]}

    @router.post("/v1/completions")
    async def completions(body: Completion, request: Request) -> Any:
        prompts = [service.tokens_of(prompt) for prompt in body.prompts]
        return await respond(request, body, prompts)

    @router.post("/v1/chat/completions")
    async def chat(body: Chat, request: Request) -> Any:
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        return await respond(request, body, [service.encode(messages)], chat=True)

    @router.post("/predict")
    async def predict(prompt: Annotated[Text, Body(embed=True)], request: Request) -> str:
        """The prompt and its continuation, as LLMSpeculativeSampling gives it."""
        answer = await respond(request, Sampling(), [service.tokens_of(prompt)])
        return prompt + answer["choices"][0]["text"]

    return router


class _Shape:
    """Answers as OpenAI shapes them, for completions or chats."""

    def __init__(self, model: str, body: Sampling, answers: Sequence[Answer], chat: bool) -> None:
        self._body, self._answers, self._chat = body, answers, chat
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        name = f"{prefix}-{secrets.token_hex(12)}"
        self._head = {"id": name, "object": kind, "created": int(time.time()), "model": model}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The response to a request without a stream."""
        choices = []
        for number in range(len(self._answers)):
            own = [piece for piece in pieces if piece.choice == number]
            text, tokens = (
                "".join(piece.text for piece in own),
                [token for piece in own for token in piece.token_ids],
            )
            choices.append(
                self._choice(
                    Piece(number, text, tokens, own[-1].finish_reason), "message", is_first=True
                )
            )
        return {**self._head, "choices": choices, **self._sums()}

    async def events(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
        """The response to a request with one, as server-sent events."""
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        begun: set[int] = set()
        try:
            async for piece in pieces:
                yield _event(
                    {**head, "choices": [self._choice(piece, "delta", piece.choice not in begun)]}
                )
                begun.add(piece.choice)
            if self._body.stream_options.get("include_usage") is True:
                yield _event({**head, "choices": [], **self._sums()})
        except HTTPException as error:
            yield _event(error_body(error.status_code, error.detail))
        yield "data: [DONE]\n\n"

    def _choice(self, piece: Piece, name: str, is_first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            content = {name: {**({"role": "assistant"} if is_first else {}), "content": piece.text}}
        if self._body.return_token_ids:
            content["token_ids"] = piece.token_ids
            if is_first:
                content["prompt_token_ids"] = self._answers[piece.choice].question.prompts[0]
        return {
            "index": piece.choice,
            **content,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }

    def _sums(self) -> dict[str, Any]:
        num_prompt = sum(len(answer.question.prompts[0]) for answer in self._answers)
        num_new = sum(answer.num_tokens for answer in self._answers)
        usage = {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }
        return {"usage": usage, "metrics": metrics(self._answers)}


async def _pieces(
    request: Request,
    answers: Sequence[Answer],
    queue: asyncio.Queue[Piece],
    note: Callable[[Answer], None],
) -> AsyncIterator[Piece]:
    """The pieces of all answers until each has ended; left early, it cancels them. HTTPException if one fails."""
    running = len(answers)
    try:
        while running:
            piece = await _while_connected(request, queue.get())
            if piece.finish_reason == "error":
                raise HTTPException(500, piece.text)
            running -= piece.finish_reason is not None
            yield piece
    finally:
        for answer in answers:
            answer.cancelled = True
            note(answer)


async def _while_connected(request: Request, waiting: Any) -> Any:
    """Wait for a result; if the client goes away first, cancel it and raise HTTPException."""
    result = asyncio.ensure_future(waiting)
    try:
        while not (await asyncio.wait([result], timeout=1.0))[0]:
            if await request.is_disconnected():
                raise HTTPException(499, "the client went away")
        return result.result()
    finally:
        result.cancel()


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _noting(service: Service, registry: CollectorRegistry) -> Callable[[Answer], None]:
    """A function that counts an answer that has ended, for `/metrics`."""
    tokens = Counter("harness_tokens", "Tokens generated.", ["arm"], registry=registry)
    drafted = Counter("harness_draft_tokens", "Draft tokens proposed.", registry=registry)
    accepted = Counter("harness_accepted_draft_tokens", "Draft tokens accepted.", registry=registry)
    first = Histogram(
        "harness_time_to_first_token_seconds", "From request to token.", registry=registry
    )
    for state in ("running", "waiting"):
        gauge = Gauge(f"harness_answers_{state}", f"Answers that are {state}.", registry=registry)
        gauge.set_function(partial(getattr, service.scheduler, f"num_{state}"))

    def note(answer: Answer) -> None:
        tokens.labels(answer.arm).inc(answer.num_tokens)
        drafted.inc(sum(proposed for proposed, _ in answer.outcomes))
        accepted.inc(sum(accepted for _, accepted in answer.outcomes))
        if answer.seconds_to_first_token is not None:
            first.observe(answer.seconds_to_first_token)

    return note
