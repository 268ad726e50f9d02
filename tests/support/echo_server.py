"""A small server with the OpenAI API, over real HTTP on this machine. It answers with tokens that count up from the
last one of the prompt, as the servers of its `dialect` do. Also a program: `echo_server.py` prints its address, and
takes the options of servers that the harness starts. It writes down what it did, as the truth about a run's figures."""

import argparse
import asyncio
import contextlib
import json
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

# Bytes as ids, after two special tokens, as in `tiny_checkpoints.make_tokenizer`.
VOCABULARY_SIZE = 258
FIRST_LETTER = ord("a")
# The token that ends texts, as llama.cpp has it.
NEVER_DRAWN = 1


def continuation(last: int, count: int, stride: int = 1) -> list[int]:
    """The server's answer to a prompt that ends in `last`."""
    return [2 + (last + 1 + stride * step) % (VOCABULARY_SIZE - 2) for step in range(count)]


Outcomes = Sequence[tuple[int, int]]
Dialect = Literal["vllm", "vllm_histogram", "sglang", "llama.cpp", "openai"]


@dataclass
class NotedAnswer:
    """What the server did for an answer.

    Attributes:
        seconds: from the request to each burst of tokens that was sent; the first has one token.
        outcomes: (drafted, accepted) of each iteration after the first token, (0, 0) of one that drafted nothing.
    """

    num_tokens: int
    outcomes: Outcomes
    seconds: list[float] = field(default_factory=list)


def iterations_of(drafts: Outcomes, num_tokens: int, known_end: int | None) -> Outcomes:
    """(drafted, accepted) of an answer's iterations after its first token, (0, 0) of one that drafts nothing.

    Args:
        drafts: of the first iterations, which come again; none at all where it is empty.
        known_end: the last iteration drafts no more than is lacking to these tokens; all where it is None.
    """
    outcomes: list[tuple[int, int]] = []
    place = 1
    while place < num_tokens:
        drafted, accepted = drafts[len(outcomes) % len(drafts)] if drafts else (0, 0)
        if known_end is None:
            accepted = min(accepted, num_tokens - place - 1)
        else:
            drafted = min(drafted, known_end - place - 1)
            accepted = min(accepted, drafted)
        outcomes.append((drafted, accepted))
        place += 1 + accepted
    return outcomes


def report_of(dialect: Dialect, outcomes: Outcomes) -> dict[str, Any]:
    """What the last event of an answer has about its drafts."""
    drafting = [outcome for outcome in outcomes if outcome[0]]
    drafted = [number for number, _ in drafting]
    accepted = [number for _, number in drafting]
    histogram = [accepted.count(number) for number in range(1 + max(accepted, default=0))]
    if dialect == "openai":
        return {}
    if dialect == "llama.cpp":
        # It leaves out zeros.
        timings = {"draft_n": sum(drafted), "draft_n_accepted": sum(accepted)}
        return {"timings": timings} if drafted else {}
    if dialect == "sglang":
        details = {
            "spec_num_proposed_drafts": sum(drafted),
            "spec_num_correct_drafts": sum(accepted),
            "spec_correct_drafts_histogram": histogram,
        }
        return {"sglext": {"spec_tokens_details": details}}
    counts: dict[str, Any] = {
        "num_draft_tokens": sum(drafted),
        "num_accepted_draft_tokens": sum(accepted),
        "acceptance_histogram": histogram,
    }
    if dialect == "vllm":
        counts |= {"per_step_drafted": drafted, "per_step_accepted": accepted}
    return {"metrics": {"speculative_decoding": counts}}


@dataclass
class EchoServer:
    """The server's behaviour, and the requests that it saw.

    Attributes:
        models: that it lists, with the place of their weights, or None.
        dialect: whose fields it has. `openai` takes text alone, no further parameters, and reports nothing.
        refuses: parameters that it does not know, and answers with status 400.
        num_draft_tokens: it claims to draft so many and to accept half of them; None if it does not speculate.
        drafts: (drafted, accepted) of an answer's iterations instead, from the first on and again.
        drafts_until: whether its last drafts are whole, or end with the answer or with the tokens that were asked for.
        lengths: tokens of answers, by prompt in turn of its hash; as many as asked for where empty.
        context: that it tells, in tokens.
        fail_every: this request and every so many after it get status 500.
        is_busy: requests get status 429.
        break_every: the same for connections that end in the middle.
        die_after: it answers so many requests, and none after them.
        stop_after: its answers end after so many tokens.
        metrics: it has a page of counters, by the names of its dialect, and its answers tell no acceptance.
        lost_pages: the reads of its page, from 1, that get status 500.
        stride: between the tokens that it counts up; another one than 1 is another model.
        scored_stride: that of the model whose log-probabilities it tells of answers to its prompts.
        num_read: tokens of each prompt that it reports.
        first_s: until the first token, if not as long as other iterations.
        delay_s: of each iteration, whether it drafts or not.
        held_tokens: tokens that it sends together, before further ones, as behind hidden thoughts or a proxy.
        slots: requests that it works on at once.
        stall: never end an answer after the first chunk.
        key: that requests must bring.
        version: it tells its name, by its dialect, and this version; None if it tells neither.
        started: its page of counters tells that it was started then.
        withheld: of llama.cpp's ids, this many are missing, as of tokens that end within a character.
        twist: makes another event of each one that it would send; a hostile server.
        drop_reused: close a connection without an answer at its second completion.
        drop_new: the same at its first one.
        num_dropped: completions that ended so.
        error_text: what a failure says.
        redirect: sends completions on to this address.
        noted: every answer, in the order of their ends.
    """

    models: Mapping[str, str | None] = field(default_factory=lambda: {"tiny": None})
    dialect: Dialect = "vllm"
    refuses: Collection[str] = ()
    num_draft_tokens: int | None = None
    drafts: Outcomes = ()
    drafts_until: Literal["always", "end", "limit"] = "always"
    lengths: Sequence[int] = ()
    context: int | None = None
    fail_every: int = 0
    break_every: int = 0
    is_busy: bool = False
    die_after: int = 0
    stop_after: int = 1_000_000
    metrics: bool = False
    lost_pages: Collection[int] = ()
    stride: int = 1
    scored_stride: int | None = None
    num_read: int | None = None
    first_s: float | None = None
    delay_s: float = 0.0
    held_tokens: int = 1
    slots: int = 1000
    stall: bool = False
    key: str | None = None
    version: str | None = None
    started: int | None = None
    withheld: int = 0
    twist: Callable[[Any], Any] = lambda event: event
    drop_reused: bool = False
    drop_new: bool = False
    num_dropped: int = 0
    error_text: str = "told to fail"
    redirect: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    noted: list[NotedAnswer] = field(default_factory=list)
    num_tokens: int = 0
    num_pages: int = 0
    num_drafts: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_accepted_at: Counter[int] = field(default_factory=Counter)
    in_flight: int = 0
    most_in_flight: int = 0
    num_abandoned: int = 0

    def __post_init__(self) -> None:
        self._free = asyncio.Semaphore(self.slots)
        if self.drafts:
            self.num_draft_tokens = max(drafted for drafted, _ in self.drafts)
        elif self.num_draft_tokens is not None:
            self.drafts = [(self.num_draft_tokens, self.num_draft_tokens // 2)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with as many requests as come."""
        num_completions = 0
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                key = headers.get("authorization")
                if self.key is not None and key != f"bearer {self.key}".lower():
                    self._send(writer, 401, {"error": {"message": f"wrong key {key}"}})
                elif lines[0].startswith("GET"):
                    path = lines[0].split()[1]
                    status, content = self._about(path)
                    self._send(writer, status, content, "/metrics" in path)
                elif self.redirect is not None and lines[0].startswith("POST"):
                    place = f"{self.redirect}/completions"
                    writer.write(
                        f"HTTP/1.1 307 X\r\nlocation: {place}\r\ncontent-length: 0\r\n\r\n".encode()
                    )
                elif num_completions < 2 and (self.drop_new, self.drop_reused)[num_completions]:
                    self.num_dropped += 1
                    return
                elif not await self._complete(json.loads(body), reader, writer):
                    break
                num_completions += lines[0].startswith("POST")
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    def _counters(self) -> str:
        """The page of counters, as Prometheus reads it."""
        spec = {
            "spec_decode_num_drafts_total": self.num_drafts,
            "spec_decode_num_draft_tokens_total": self.num_proposed,
            "spec_decode_num_accepted_tokens_total": self.num_accepted,
        }
        for position, number in self.num_accepted_at.items():
            label = f'{{engine="0",position="{position}"}}'
            spec[f"spec_decode_num_accepted_tokens_per_pos_total{label}"] = number
        names: dict[str, float] = {}
        if self.num_draft_tokens is not None:
            names = {f"vllm:{name}": value for name, value in spec.items()}
        names['vllm:generation_tokens_total{engine="0"}'] = self.num_tokens
        if self.dialect == "sglang":
            names = {
                "sglang:generation_tokens_total": self.num_tokens,
                "sglang:spec_verify_calls_total": self.num_drafts,
            }
        if self.dialect == "llama.cpp":
            names = {f"llamacpp:{name}": value for name, value in spec.items()}
            names["llamacpp:tokens_predicted_total"] = self.num_tokens
        if self.started is not None:
            names["process_start_time_seconds"] = self.started
        return "# TYPE x counter\n" + "".join(f"{name} {value}\n" for name, value in names.items())

    def _about(self, path: str) -> tuple[int, Any]:
        """The answer to a GET request: status and content."""
        if "/metrics" in path:
            told = (self.metrics or self.started is not None) and path == "/metrics"
            self.num_pages += told
            if told and self.num_pages in self.lost_pages:
                return 500, ""
            return (200, self._counters()) if told else (404, "")
        owner = {"llama.cpp": "llamacpp"}.get(self.dialect, self.dialect)
        versions = {"/props": "build_info", "/version": "version", "/server_info": "version"}
        if path in versions:
            about: dict[str, Any] = {versions[path]: self.version}
            if self.dialect == "llama.cpp" and path == "/props":
                about["default_generation_settings"] = {"n_ctx": self.context or 4096}
            told = {key: value for key, value in about.items() if value is not None}
            return (200, told) if told else (404, {})
        owned = {} if self.version is None else {"owned_by": owner}
        context = None if self.dialect == "llama.cpp" else self.context
        details: dict[str, Any] = {"max_model_len": context, **owned}
        models = [{"id": name, "root": root, **details} for name, root in self.models.items()]
        return 200, {"object": "list", "data": models}

    async def _complete(
        self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Answer one request; False to close the connection."""
        is_refused = any(name in body for name in self.refuses)
        if self.dialect == "openai" and ("top_k" in body or isinstance(body.get("prompt"), list)):
            is_refused = True
        if is_refused:
            self._send(writer, 400, {"error": {"message": "unknown parameter"}})
            return True
        if self.scored_stride is not None and "prompt_logprobs" in body:
            entries = self._prompt_logprobs(body["prompt"], self.scored_stride)
            self._send(writer, 200, {"choices": [{"prompt_logprobs": entries}]})
            return True
        self.bodies.append(body)
        number = len(self.bodies)
        if self.die_after and number > self.die_after:
            return False
        if self.is_busy:
            self._send(writer, 429, {"error": {"message": "busy"}})
            return True
        if self.fail_every and number % self.fail_every == 0:
            self._send(writer, 500, {"error": {"message": self.error_text}})
            return True
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            chunk_count = 0
            async for chunk in self._chunks(body):
                data = f"data: {json.dumps(self.twist(chunk)) if chunk else '[DONE]'}\n\n".encode()
                writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                await writer.drain()
                chunk_count += 1
                if self.break_every and number % self.break_every == 0 and chunk_count == 2:
                    return False
                while self.stall:
                    await asyncio.sleep(0.01)
                    if reader.at_eof():
                        raise ConnectionError
            writer.write(b"0\r\n\r\n")
        except ConnectionError:
            self.num_abandoned += 1
            raise
        finally:
            self.in_flight -= 1
        return True

    def _prompt_logprobs(self, text: list[int], stride: int) -> list[Any]:
        """As vLLM has them: nearly all of the mass is on the token that counts on."""
        prompts = [body["prompt"] for body in self.bodies]
        prompt = max((known for known in prompts if text[: len(known)] == known), key=len)
        expected = continuation(prompt[-1], len(text) - len(prompt), stride)
        entries: list[Any] = [None] * len(prompt)
        for token, likeliest in zip(text[len(prompt) :], expected, strict=True):
            logprobs = {token: -30.0, likeliest: 0.0}
            entries.append({str(key): {"logprob": value} for key, value in logprobs.items()})
        return entries

    async def _chunks(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any] | None]:
        received = time.perf_counter()
        tokens = self._answer_to(body)
        ends = {"always": None, "end": len(tokens), "limit": body["max_tokens"]}
        outcomes = iterations_of(self.drafts, len(tokens), ends[self.drafts_until])
        noted = NotedAnswer(len(tokens), outcomes)
        num_made = num_sent = 0
        async with self._free:
            for place, (drafted, accepted) in enumerate([(0, 0), *outcomes]):
                is_first = place == 0 and self.first_s is not None
                await asyncio.sleep(self.first_s if is_first else self.delay_s)
                self.num_drafts += drafted > 0
                self.num_proposed += drafted
                self.num_accepted += accepted
                self.num_accepted_at.update(range(accepted))
                new = min(1 + accepted, len(tokens) - num_made)
                self.num_tokens += new
                num_made += new
                if num_made < min(self.held_tokens, len(tokens)):
                    continue
                noted.seconds.append(time.perf_counter() - received)
                yield self._event(body, tokens[num_sent:num_made], num_made == len(tokens))
                num_sent = num_made
        self.noted.append(noted)
        usage = {"completion_tokens": len(tokens), "prompt_tokens": self.num_read}
        last_chunk: dict[str, Any] = {"choices": [], "usage": usage}
        if self.dialect == "llama.cpp" and body.get("verbose"):
            # JSON has no infinity.
            biases = [{"bias": None, "token": NEVER_DRAWN}] if body["ignore_eos"] else []
            settings = {"logit_bias": biases, "samplers": body["samplers"]}
            last_chunk["__verbose"] = {"tokens": [], "generation_settings": settings}
        if self.num_draft_tokens is not None and not self.metrics:
            last_chunk |= report_of(self.dialect, outcomes)
        yield last_chunk
        yield None

    def _answer_to(self, body: dict[str, Any]) -> list[int]:
        messages = body.get("messages")
        prompt = body["prompt"] if messages is None else messages[-1]["content"]
        count = min(body["max_tokens"], self.stop_after)
        if self.lengths:
            place = zlib.crc32(str(prompt).encode()) % len(self.lengths)
            count = min(count, self.lengths[place])
        last = prompt[-1] if isinstance(prompt, list) else len(prompt)
        tokens = _stopped(continuation(last, count, self.stride), body.get("stop", ()))
        stop_ids = body.get("stop_token_ids", ())
        return tokens[: next((at for at, t in enumerate(tokens, 1) if t in stop_ids), None)]

    def _event(self, body: dict[str, Any], step: list[int], is_last: bool) -> dict[str, Any]:
        """The event with these tokens of an answer."""
        text = _text(step)
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if is_last else None}
        if "messages" in body:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        if self.dialect.startswith("vllm") and body.get("return_token_ids"):
            choice["token_ids"] = step
        event: dict[str, Any] = {"object": "text_completion", "choices": [choice]}
        if self.dialect == "llama.cpp" and body.get("verbose"):
            shown = step[self.withheld :] if is_last else step
            event["__verbose"] = {"content": text, "tokens": shown, "stop": False}
        return event

    @staticmethod
    def _send(
        writer: asyncio.StreamWriter, status: int, content: Any, is_text: bool = False
    ) -> None:
        data = (content if is_text else json.dumps(content)).encode()
        head = f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(f"HTTP/1.1 {status} X\r\n{head}".encode() + data)


def _text(tokens: list[int]) -> str:
    return "".join(chr(FIRST_LETTER + token % 26) for token in tokens)


def _stopped(tokens: list[int], stops: list[str]) -> list[int]:
    """The tokens before the first of these texts."""
    text = _text(tokens)
    ends = [text.index(stop) for stop in stops if stop in text]
    return tokens[: min(ends, default=len(tokens))]


# The fixture `serve` of tests/commands.
Serve = Callable[..., list[str]]


@contextmanager
def serving(server: EchoServer) -> Iterator[str]:
    """The address of `server`, which runs in a thread until the block ends."""
    loop = asyncio.new_event_loop()
    listening = loop.run_until_complete(asyncio.start_server(server.serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        listening.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    # vLLM's, SGLang's and llama.cpp's words for K.
    parser.add_argument("-k", "--speculative-num-steps", "--spec-draft-n-max", type=int, dest="k")
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--delay", type=float, default=0.001)
    asked, _ = parser.parse_known_args()
    k = asked.k or asked.speculative_config.get("num_speculative_tokens")
    server = EchoServer(num_draft_tokens=k, delay_s=asked.delay)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", asked.port)
    print(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1", flush=True)
    await listening.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
