"""The HTTP side of `serve`: completions and chats as in OpenAI's API.

For a request, the service generates answers (`ServedModel.ask`), whose pieces arrive in a queue. This file turns these
pieces into responses in the form of OpenAI's API.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from harness import __version__
from harness.commands.serve.bodies import (
    ChatBody,
    Completion,
    GenerationBody,
    Prediction,
)
from harness.commands.serve.served_model import ServedModel
from harness.config.errors import SettingError
from harness.config.machine import is_loopback
from harness.engines.door.serving import ENDING, Piece, Refusal
from harness.results.drafts import Drafts

if TYPE_CHECKING:
    from harness.local.serving import ServedAnswer


_OPEN = "/health"  # needs no key, because it reveals nothing
CLIENT_LEFT = 499  # nginx's code for a client that left before an answer began


@dataclass(frozen=True)
class Guard:
    """Middleware that refuses requests without the right host, key or length.

    Attributes:
        app: the application that answers all other requests.
        local: whether to answer only requests whose Host is a loopback address. Otherwise a web page whose domain name
            points to this machine could use the service (DNS rebinding).
        key: the API key that requests must send; None if they need none.
        max_bytes: the most bytes of a body.
    """

    app: ASGIApp
    local: bool
    key: str | None
    max_bytes: int

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Called by the server for each request: pass the request on to the application, or refuse it."""
        answer: ASGIApp = self.app
        if scope["type"] == "http":
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
            }
            answer = self._refusal(scope["path"], headers) or self.app
        await answer(scope, receive, send)

    def _refusal(self, path: str, headers: dict[str, str]) -> JSONResponse | None:
        """The response that refuses a request; None if nothing is wrong with it."""
        try:
            host = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            return error_response(400, "the Host header is no address")
        # Browsers always send a Host, so a request without one does not come from a web page.
        if self.local and not is_loopback(host or "localhost"):
            return error_response(400, "this service answers requests for localhost alone")
        if self.key and path != _OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_right = secrets.compare_digest(given.strip().encode("latin-1"), self.key.encode())
            if scheme.lower() != "bearer" or not is_right:
                return error_response(401, "the API key is missing or wrong")
        if "transfer-encoding" in headers:
            return error_response(411, "a body must come with its length")
        length = headers.get("content-length", "0")
        if not length.isdecimal():
            return error_response(400, "the Content-Length header is no number")
        # At most 18 digits, because Python refuses to convert a text with thousands of digits.
        if len(length) > 18 or int(length) > self.max_bytes:
            return error_response(413, f"the body is larger than {self.max_bytes} bytes")
        return None


def error_response(status: int, message: str, member: str | None = None) -> JSONResponse:
    """A response with an `error_body`, and the headers that belong to its status."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
    return JSONResponse(error_body(status, message, member), status, headers.get(status))


def error_body(status: int, message: str, member: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's form.

    Args:
        member: the name of the request's member that is wrong; None if no single member is.
    """
    kinds = {401: "authentication_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    # The message may quote the request, whose JSON may contain lone surrogates.
    text = message.encode(errors="backslashreplace").decode()[:500]
    return {"error": {"message": text, "type": kind, "param": member, "code": None}}


# The most bytes of a request; more are allowed if the longest prompts need more, at `_BYTES_PER_TOKEN`, because a token
# may have many characters of text or JSON.
_MOST_BYTES = 1_000_000
_BYTES_PER_TOKEN = 64


def make_app(served: ServedModel, key: str | None) -> FastAPI:
    """The application that answers all requests.

    Args:
        key: the API key that requests must send; None if they need none.
    """
    settings = served.settings
    app = FastAPI(
        title="harness",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        # Replaces the 422 that FastAPI would document.
        responses={
            400: {"description": "The request is wrong"},
            "default": {"description": "Refused, with an error as OpenAI words it"},
        },
    )
    max_bytes = max(
        _MOST_BYTES, _BYTES_PER_TOKEN * settings.most_prompts * settings.max_prompt_tokens
    )
    app.add_middleware(Guard, local=is_loopback(settings.host), key=key, max_bytes=max_bytes)
    # `/regular` generates without the draft. Without a draft, both prefixes use the same arm.
    app.include_router(_generation(served, settings.arms[-1]))
    app.include_router(_generation(served, "regular"), prefix="/regular", include_in_schema=False)

    @app.get("/health")
    def health() -> dict[str, str]:
        """Say whether the service runs."""
        if not served.service.is_running:
            raise Refusal(503, ENDING)
        return {"status": "ok"}

    _add_error_handlers(app)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Add handlers that answer every expected error in the form of OpenAI's API."""

    @app.exception_handler(SettingError)
    async def wrong_setting(request: Request, error: SettingError) -> JSONResponse:
        return error_response(400, str(error))

    @app.exception_handler(Refusal)
    async def refused(request: Request, refusal: Refusal) -> JSONResponse:
        return error_response(refusal.status, str(refusal))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        response = error_response(error.status_code, error.detail)
        # Headers such as the list of methods that a path allows.
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        """Name the parameter and what is wrong with it: `temperature: Input should be a valid number`."""
        errors = error.errors()
        # If a member may have several types, there is an error for each type. The error deepest in the body is about
        # the type that the client meant. Parts of a location that contain a bracket are names of types.
        member = errors[0]["loc"][:2]
        chosen = [error for error in errors if error["loc"][:2] == member]
        first = max(chosen, key=lambda error: len(error["loc"]))
        parts = [str(part) for part in first["loc"][1:]]
        parameter = ".".join(part for part in parts if "[" not in part) or "body"
        if first["type"] == "json_invalid":
            parameter = "body"
        reason = first["msg"].removeprefix("Value error, ")
        media_type = request.headers.get("content-type", "").partition(";")[0]
        if parameter == "body" and "json" not in media_type:
            reason = "must be JSON: send content-type: application/json"
        return error_response(
            400, f"{parameter}: {reason}", None if parameter == "body" else parameter
        )


def _generation(served: ServedModel, arm: str) -> APIRouter:
    """The endpoints of OpenAI's API (and `/predict`), which generate with one arm, `regular` or `speculative`."""
    router = APIRouter()

    async def tokens_of(prompts: Sequence[str | list[int]]) -> list[list[int]]:
        most = served.settings.most_prompts
        if len(prompts) > most:
            raise Refusal(400, f"prompt: {len(prompts)} prompts; at most {most} in a request")
        # Encoding a long text takes seconds, so it is done in a thread, while other requests are answered.
        return [await run_in_threadpool(served.tokens_of, prompt) for prompt in prompts]

    async def respond(
        request: Request, body: GenerationBody, prompts: list[list[int]], chat: bool = False
    ) -> Any:
        """The response to a request: a stream of events, or one JSON object.

        Raises:
            Refusal: for a wrong request, or if generating fails. In a stream that has begun, it becomes an event.
        """
        queue: asyncio.Queue[Piece | Refusal] = asyncio.Queue()
        answers = served.ask(arm, prompts, body, queue)
        pieces = _pieces(request, answers, queue)
        shape = _Shape(served, body, answers, chat)
        if body.stream:
            return StreamingResponse(_events(shape.chunks(pieces)), media_type="text/event-stream")
        return shape.whole([piece async for piece in pieces])

    @router.get("/v1/models")
    def models() -> dict[str, Any]:
        about = {"id": served.name, "object": "model", "created": served.started}
        return {"object": "list", "data": [{**about, "owned_by": "harness"}]}

    @router.post("/v1/completions")
    async def completions(body: Completion, request: Request) -> Any:
        return await respond(request, body, await tokens_of(body.prompts))

    @router.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Any:
        prompt = await run_in_threadpool(served.encode, body)
        return await respond(request, body, [prompt], chat=True)

    @router.post("/predict")
    async def predict(body: Prediction, request: Request) -> str:
        """The prompt and its continuation, as LLMSpeculativeSampling's server answers."""
        answer = await respond(request, GenerationBody(), await tokens_of([body.prompt]))
        return body.prompt + str(answer["choices"][0]["text"])

    return router


class _Shape:
    """Turns answers into responses in OpenAI's form.

    Args:
        body: the request.
        answers: the answers to its prompts.
        chat: whether the request is a chat; otherwise it is a completion.
    """

    def __init__(
        self, served: ServedModel, body: GenerationBody, answers: Sequence[ServedAnswer], chat: bool
    ) -> None:
        self._body = body
        self._answers = answers
        self._chat = chat
        kind, prefix = ("chat.completion", "chatcmpl") if chat else ("text_completion", "cmpl")
        name = f"{prefix}-{secrets.token_hex(12)}"
        created = int(time.time())
        self._head = {"id": name, "object": kind, "created": created, "model": served.name}

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The whole response to a request without a stream."""
        choices = []
        for number in range(len(self._answers)):
            choice_pieces = [piece for piece in pieces if piece.choice == number]
            text = "".join(piece.text for piece in choice_pieces)
            tokens = [token for piece in choice_pieces for token in piece.token_ids]
            whole = Piece(number, text, tokens, choice_pieces[-1].finish_reason)
            choices.append(self._choice(whole, "message", is_first=True))
        return {**self._head, "choices": choices, **self._sums()}

    async def chunks(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[dict[str, Any]]:
        """The chunks of the response to a request with a stream: one for each piece and, if the request asks for it, a
        last one with the usage.
        """
        head = {**self._head, "object": "chat.completion.chunk"} if self._chat else self._head
        options = self._body.stream_options
        begun: set[int] = set()
        num_sent = 0
        async for piece in pieces:
            choice = self._choice(piece, "delta", piece.choice not in begun)
            begun.add(piece.choice)
            num_sent += len(piece.token_ids)
            usage = {"usage": self._usage(num_sent)} if options.continuous_usage_stats else {}
            yield {**head, "choices": [choice], **usage}
        if options.include_usage:
            yield {**head, "choices": [], **self._sums()}

    def _choice(self, piece: Piece, member: str, is_first: bool) -> dict[str, Any]:
        """An entry of `choices` with the text of a piece.

        Args:
            member: the key for a chat's text, `message` or `delta`.
            is_first: whether this is the first piece of its answer.
        """
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            role = {"role": "assistant"} if is_first else {}
            content = {member: {**role, "content": piece.text}}
        if self._body.return_token_ids:
            content["token_ids"] = piece.token_ids
            if is_first:
                content["prompt_token_ids"] = self._answers[piece.choice].request.prompt
        return {
            "index": piece.choice,
            **content,
            "logprobs": None,
            "finish_reason": piece.finish_reason,
        }

    def _sums(self) -> dict[str, Any]:
        """The members about all answers together, which are known once these have ended."""
        num_new = sum(len(answer.token_ids) for answer in self._answers)
        return {"usage": self._usage(num_new), "metrics": _metrics(self._answers)}

    def _usage(self, num_new: int) -> dict[str, int]:
        """The numbers of tokens of all prompts and, so far, of all answers."""
        num_prompt = sum(len(answer.request.prompt) for answer in self._answers)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }


async def _pieces(
    request: Request, answers: Sequence[ServedAnswer], queue: asyncio.Queue[Piece | Refusal]
) -> AsyncIterator[Piece]:
    """Yield the pieces of all answers, until each answer has ended. If the caller stops earlier, answers are cancelled.

    Raises:
        Refusal: if an answer failed, or the client disconnected.
    """
    running = len(answers)
    try:
        while running:
            piece = await _while_connected(request, queue.get())
            if isinstance(piece, Refusal):
                raise piece
            running -= piece.finish_reason is not None
            yield piece
    finally:
        for answer in answers:
            answer.cancel()


async def _while_connected(request: Request, waiting: Any) -> Any:
    """Wait for a result. If the client disconnects first, cancel the result and raise a Refusal."""
    result = asyncio.ensure_future(waiting)
    try:
        while True:
            done, _ = await asyncio.wait([result], timeout=1.0)
            # Check this even if pieces arrive quickly, because other clients wait for the end of this answer.
            if await request.is_disconnected():
                raise Refusal(CLIENT_LEFT, "the client went away")
            if done:
                return result.result()
    finally:
        result.cancel()


async def _events(contents: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """Yield server-sent events in OpenAI's form. An error becomes the last event before `[DONE]`."""
    try:
        async for content in contents:
            yield f"data: {json.dumps(content)}\n\n"
    except Refusal as refusal:
        yield f"data: {json.dumps(error_body(refusal.status, str(refusal)))}\n\n"
    yield "data: [DONE]\n\n"


def _metrics(answers: Sequence[ServedAnswer]) -> dict[str, Any] | None:
    """The acceptance of these answers together, under vLLM's names; None if nothing was drafted."""
    outcomes = [outcome for answer in answers for outcome in answer.outcomes]
    acceptance = Drafts.of(outcomes)
    if not acceptance.drafting:
        return None
    columns = acceptance.columns()
    figures = {
        "mean_acceptance_length": columns["mean_acceptance_length"],
        "draft_acceptance_rate": columns["acceptance_rate"],
        "acceptance_histogram": acceptance.histogram,
        "num_spec_steps": acceptance.drafting,
        "num_accepted_draft_tokens": acceptance.accepted,
        "num_draft_tokens": acceptance.proposed,
        "per_step_accepted": [accepted for _, accepted in outcomes],
        "per_step_drafted": [proposed for proposed, _ in outcomes],
    }
    return {"speculative_decoding": figures}
