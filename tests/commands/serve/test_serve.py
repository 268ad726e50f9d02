"""The service over a real socket, with the real openai client."""

import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pandas as pd
import pytest

from forked import Forked
from in_process import Harness
from served import CLIENT, serving

openai = pytest.importorskip("openai", reason="is not installed")
pytest.importorskip("fastapi", reason="specharness[serve] is not installed")


PROMPTS = ["Once upon a time", "12 + 30 =", "What is 7 times 8?", "The fox", "In a small village"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Forked]]:
    """The address of a service, and its process. It leaves no file."""
    directory = tmp_path_factory.mktemp("serve")
    with serving(directory, "max_waiting=11") as started:
        yield started
    assert list(directory.iterdir()) == []


@pytest.fixture(scope="module")
def url(service: tuple[str, Forked]) -> str:
    return service[0]


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def post(url: str, path: str, body: Any, **options: Any) -> Any:
    return CLIENT.post(f"{url}{path}", json=body, **options)


def sent(url: str, path: str, body: Any) -> Any:
    """The answer to what a client's own encoder would not write."""
    content = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    return CLIENT.post(f"{url}{path}", content=content, headers=headers)


def test_completions(client: Any, url: str) -> None:
    [model] = client.models.list().data
    assert (model.id, model.owned_by) == ("tiny", "harness")
    greedy = {"model": "tiny", "prompt": PROMPTS[0], "temperature": 0, "max_tokens": 30}
    whole = client.completions.create(**greedy)
    alone = client.with_options(base_url=f"{url}/regular/v1").completions.create(**greedy)
    assert whole.choices[0].text == alone.choices[0].text
    assert whole.usage.completion_tokens == 30
    assert whole.usage.prompt_tokens + 30 == whole.usage.total_tokens
    assert whole.choices[0].finish_reason == "length"
    drafted = whole.metrics["speculative_decoding"]
    assert drafted["num_draft_tokens"] == sum(drafted["per_step_drafted"]) > 0
    assert drafted["num_accepted_draft_tokens"] == sum(drafted["per_step_accepted"])
    assert sum(drafted["acceptance_histogram"]) == drafted["num_spec_steps"]
    # Each iteration gives one token more than it accepts, and the prompt one.
    assert 1 + drafted["num_spec_steps"] + drafted["num_accepted_draft_tokens"] in (30, 31)
    assert alone.metrics is None


def test_streams(client: Any) -> None:
    options = {"model": "tiny", "prompt": PROMPTS[1], "max_tokens": 20, "seed": 3}
    options["extra_body"] = {"return_token_ids": True}
    whole = client.completions.create(**options)
    usage = {"include_usage": True}
    chunks = list(client.completions.create(**options, stream=True, stream_options=usage))
    texts = [chunk.choices[0].text for chunk in chunks[:-1]]
    assert "".join(texts) == whole.choices[0].text
    token_ids = [token for chunk in chunks[:-1] for token in chunk.choices[0].token_ids]
    assert token_ids == whole.choices[0].token_ids
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage == whole.usage
    assert chunks[-1].metrics == whole.metrics
    assert len(texts) == 1 + whole.metrics["speculative_decoding"]["num_spec_steps"]


def test_chats(client: Any) -> None:
    messages: Any = [{"role": "user", "content": PROMPTS[0]}]
    options = {"model": "tiny", "messages": messages, "temperature": 0, "max_completion_tokens": 12}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    plain = client.completions.create(model="tiny", prompt=PROMPTS[0], temperature=0, max_tokens=12)
    # Without a template a chat is its text.
    assert plain.choices[0].text == whole.choices[0].message.content == text


def test_predict_is_the_prompt_and_its_continuation(url: str) -> None:
    for arm in ("", "/regular"):
        text = post(url, f"{arm}/predict", {"prompt": PROMPTS[0]}).json()
        assert text.startswith(PROMPTS[0])
        assert len(text) > len(PROMPTS[0])


def test_prompts_as_tokens_and_several_at_once(client: Any) -> None:
    options: Any = {"model": "tiny", "temperature": 0, "max_tokens": 10}
    options["extra_body"] = {"return_token_ids": True}
    several = client.completions.create(prompt=PROMPTS[:3], **options)
    ids = [choice.prompt_token_ids for choice in several.choices]
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    again = client.completions.create(prompt=ids, **options)
    assert [one.text for one in again.choices] == [one.text for one in several.choices]
    assert several.usage.prompt_tokens == sum(map(len, ids))


def test_a_seed_decides(client: Any) -> None:
    """Sampled answers are the same again, whatever others ask for meanwhile."""
    asked = [
        {"prompt": prompt, "seed": number, "temperature": [0.0, 0.7, 1.0][number % 3], "max_tokens": 8 + 2 * number,
         "extra_body": {"top_k": 20 * (number % 2)}}
        for number, prompt in enumerate(PROMPTS)
    ]  # fmt: skip

    def text(body: dict[str, Any]) -> str:
        return client.completions.create(model="tiny", **body).choices[0].text

    alone = [text(body) for body in asked]
    assert len(set(alone)) == len(alone)
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(text, asked))
    assert together == alone


COMPLETION = "/v1/completions"
CHAT = "/v1/chat/completions"
GOOD = {"prompt": "a", "max_tokens": 2}
USER = {"role": "user", "content": "a"}
NOT_WHOLE = "Input should be a valid"
# What is sent, and how the message begins.
REFUSED: list[tuple[str, Any, int, str]] = [
    (COMPLETION, b"{", 400, "body: "),
    (COMPLETION, b"[" * 100_000, 400, ""),
    (COMPLETION, b"9" * 5000, 400, ""),
    (COMPLETION, {"prompt": "a" * 2_000_000}, 413, "the body is larger than"),
    *((COMPLETION, body, 400, f"body: {NOT_WHOLE} dictionary") for body in ([], "text", None, 5)),
    (COMPLETION, {"prompt": "\ud800"}, 400, "prompt: must be text"),
    (COMPLETION, {"prompt": [[5, True]]}, 400, f"prompt.0.1: {NOT_WHOLE} integer"),
    (COMPLETION, {"prompt": ["a", 5]}, 400, f"prompt.1: {NOT_WHOLE} string"),
    (COMPLETION, {"prompt": ""}, 400, "prompt: has no tokens"),
    (COMPLETION, {"prompt": [[], [5]]}, 400, "prompt: has no tokens"),
    (COMPLETION, {"prompt": "word " * 300}, 400, "prompt: "),
    (COMPLETION, {"prompt": [5, 960]}, 400, "prompt: token 960 does not exist"),
    (COMPLETION, {"prompt": ["a"] * 13}, 400, "prompt: 13 prompts; at most 12"),
    (COMPLETION, {**GOOD, "max_tokens": "4"}, 400, f"max_tokens: {NOT_WHOLE} integer"),
    (COMPLETION, {**GOOD, "max_tokens": 10_000}, 400, "max_tokens: 10000 after a prompt of 1 tokens; at most 256"),
    (COMPLETION, {**GOOD, "top_p": 0}, 400, "top_p: Input should be greater than 0"),
    (COMPLETION, {**GOOD, "temperature": 1e-30}, 400, "temperature=1e-30: must be 0 (greedy) or at least"),
    (COMPLETION, {**GOOD, "temperature": float("nan")}, 400, "temperature: Input should be a finite number"),
    (COMPLETION, {**GOOD, "temperature": 1e308}, 400, "temperature: Input should be less than"),
    (COMPLETION, {**GOOD, "seed": 10**400}, 400, "seed: Input should be less than"),
    (COMPLETION, {**GOOD, "stop": ["a"] * 17}, 400, "stop: List should have at most 16 items"),
    (COMPLETION, {**GOOD, "stop": ""}, 400, "stop.0: Value should have at least 1 item"),
    (COMPLETION, {**GOOD, "stream_options": 1}, 400, f"stream_options: {NOT_WHOLE} dictionary"),
    # What would be ignored.
    (COMPLETION, {**GOOD, "\ud800": 1}, 400, f"body: {NOT_WHOLE} string"),
    (COMPLETION, {**GOOD, "logit_bias": {"5": 100}}, 400, "logit_bias: Extra inputs are not permitted"),
    (COMPLETION, {**GOOD, "min_p": 1}, 400, "min_p: Extra inputs"),
    (CHAT, {"messages": [USER], "n": True}, 400, "n: Extra inputs"),
    (CHAT, {"messages": [USER], "model": "another"}, 404, "model: another is not served here; tiny is"),
    (CHAT, {"messages": []}, 400, "messages: "),
    (CHAT, {"messages": [{"role": "judge", "content": "a"}]}, 400, "messages.0.role: "),
    ("/predict", {"prompt": "a", "top_p": 0.5}, 400, "top_p: Extra inputs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED)
def test_errors_say_what_is_wrong(url: str, path: str, body: Any, status: int, says: str) -> None:
    answer = sent(url, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    message = error["message"]
    assert message.startswith(says)
    assert "\n" not in message
    assert error["param"] in (None, message.partition(": ")[0])


def test_bodies_are_json_and_have_a_length(url: str) -> None:
    for headers in ({}, {"Content-Type": "text/plain; application/json"}):
        answer = CLIENT.post(f"{url}/predict", content='{"prompt": "x"}', headers=headers)
        assert "body: must be JSON: send content-type: application/json" in answer.text
    headers = {"Content-Type": "application/json"}
    chunked = CLIENT.post(f"{url}{COMPLETION}", content=iter([b"{}"]), headers=headers)
    assert chunked.status_code == 411
    assert CLIENT.get(f"{url}/nowhere").json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": "\ud83d\ude00 \u0000 \u202e"},
        {"prompt": [[5], [6, 7]]},
        {"top_p": 1e-300},
        {"seed": -(2**63)},
        {"stop_token_ids": [2**70]},
        # What changes nothing.
        {"model": "tiny", "n": 1, "best_of": 1, "echo": False, "logprobs": None, "frequency_penalty": 0.0, "min_p": 0,
         "repetition_penalty": 1.0, "logit_bias": {}, "suffix": None, "user": "somebody", "metadata": {"a": 1}},
    ],
)  # fmt: skip
def test_odd_requests_are_answered(url: str, changes: dict[str, Any]) -> None:
    body = GOOD | changes
    answer = sent(url, COMPLETION, body)
    assert answer.status_code == 200, answer.text
    num_prompts = 1 if isinstance(body["prompt"], str) else len(body["prompt"])
    assert answer.json()["usage"]["completion_tokens"] == 2 * num_prompts


def test_the_schema_says_what_status_a_wrong_request_gets(url: str) -> None:
    for operations in CLIENT.get(f"{url}/openapi.json").json()["paths"].values():
        for operation in operations.values():
            assert {"400", "default"} <= set(operation["responses"])
            assert "422" not in operation["responses"]


WHOLE = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF_BODY = (
    "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    'Content-Length: 100\r\n\r\n{"prompt": '
)


def expect_whole_requests_soon() -> None:
    pytest.MonkeyPatch().setattr("harness.commands.serve.command._REQUEST_S", 0.5)


@pytest.mark.slow
def test_a_connection_whose_request_never_ends_is_closed(tmp_path: Path) -> None:
    with serving(tmp_path, before=expect_whole_requests_soon) as (url, _):
        address = httpx.URL(url)
        for sent in (HALF_BODY, WHOLE + WHOLE[:20]):
            with (
                socket.create_connection((address.host, address.port)) as connection,
                connection.makefile("rb") as answer,
            ):
                connection.sendall(sent.encode())
                received = answer.read()  # until the service closes it
            assert received.count(b"HTTP/1.1 200 OK") == sent.startswith(WHOLE)


@pytest.mark.parametrize(
    ("host", "status"),
    [("evil.example", 400), ("127.evil.example", 400), ("127.0.0.1.evil.example:5000", 400), ("127.1", 400),
     ("[::1", 400), ("localhost:1", 200), ("127.0.0.9", 200), ("[::1]:5000", 200)],
)  # fmt: skip
def test_only_requests_for_this_machine_are_answered(url: str, host: str, status: int) -> None:
    assert CLIENT.get(f"{url}/health", headers={"Host": host}).status_code == status


def test_too_many_requests_are_refused(service: tuple[str, Forked]) -> None:
    """All of them have arrived when the service, which was stopped meanwhile, looks."""
    url, process = service
    address = httpx.URL(url)
    body = json.dumps({"prompt": PROMPTS[0], "max_tokens": 20, "ignore_eos": True})
    head = ["POST /v1/completions HTTP/1.1", f"Host: {address.host}", "Connection: close"]
    head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    request = "\r\n".join([*head, "", body]).encode()
    process.send_signal(signal.SIGSTOP)
    try:
        asked = [socket.create_connection((address.host, address.port)) for _ in range(40)]
        for connection in asked:
            connection.sendall(request)
    finally:
        process.send_signal(signal.SIGCONT)
    statuses = []
    for connection in asked:
        with connection, connection.makefile("rb") as answer:
            first, _, rest = answer.read().decode().partition("\r\n")
        statuses.append(int(first.split()[1]))
        assert statuses[-1] != 429 or "retry-after: 1\r\n" in rest.lower()
    assert set(statuses) == {200, 429}
    assert statuses.count(200) >= 12


def slow_down() -> None:
    """Leave the command no grace period after a signal, and let it rest before every iteration."""
    from harness.local.decoding.loop import Loop

    step = Loop.step

    def step_later(loop: Loop) -> Any:
        time.sleep(0.3)
        return step(loop)

    patch = pytest.MonkeyPatch()
    patch.setattr(Loop, "step", step_later)
    patch.setattr("harness.commands.serve.command._GRACE_S", 0)


def require_key(url: str) -> None:
    """The key alone opens what costs something."""
    assert CLIENT.get(f"{url}/v1/models").status_code == 401
    assert CLIENT.get(f"{url}/health").json() == {"status": "ok"}
    for authorization, status in (("BEARER  secret", 200), ("Bearer", 401), ("Basic secret", 401)):
        headers = {"Authorization": authorization}
        assert CLIENT.get(f"{url}/v1/models", headers=headers).status_code == status
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as made:
        assert made.models.list().data
        with pytest.raises(openai.AuthenticationError):
            made.with_options(api_key="wrong").models.list()


def leave(url: str, body: dict[str, Any]) -> None:
    """Ask, and close the connection before the answer has come, or within it."""
    patience = httpx.Timeout(None, read=None if body["stream"] else 0.2)
    with httpx.Client(timeout=patience, headers=KEY) as leaving:
        try:
            with leaving.stream("POST", f"{url}/v1/completions", json=body) as response:
                next(response.iter_lines())
        except httpx.ReadTimeout:
            assert not body["stream"]


KEY = {"Authorization": "Bearer secret"}


def test_a_key_is_asked_for_clients_that_leave_hold_up_nobody_and_a_signal_ends_streams(
    tmp_path: Path,
) -> None:
    """An answer takes a minute, so that none has ended before the last one is asked for: one runs and the others wait
    when the grace, here none, is over. Every service of these tests is ended by the other signal, Ctrl-C.
    """
    body = {"prompt": PROMPTS[0], "max_tokens": 250, "ignore_eos": True, "stream": True}
    ends: list[str] = []

    def read(url: str) -> None:
        path = f"{url}/v1/completions"
        with CLIENT.stream("POST", path, json=body, headers=KEY) as stream:
            started.release()
            lines = [line for line in stream.iter_lines() if line]
        ends.append(lines[-2])
        assert lines[-1] == "data: [DONE]"

    started = threading.Semaphore(0)
    settings = ["draft=none", "api_key_variable=TINY_KEY"]
    with serving(tmp_path, *settings, before=slow_down, TINY_KEY="secret") as (url, process):
        require_key(url)
        for streaming in (True, False, True):
            leave(url, {**body, "stream": streaming})
        short = {"prompt": PROMPTS[0], "max_tokens": 2, "ignore_eos": True}
        assert post(url, "/v1/completions", short, headers=KEY).json()["usage"]["total_tokens"]
        threads = [threading.Thread(target=read, args=[url]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for _ in threads:
            started.acquire()
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
    assert len(ends) == 8
    assert all('"message": "the service is ending"' in end for end in ends)


def test_latency_agrees_with_the_local_engine(url: str, tmp_path: Path, harness: Harness) -> None:
    """The same texts and the same acceptance; of requests in flight one is answered and the others wait."""
    common = ["latency", "num_prompts=4", "num_warmup=0", "T=0", "tokens=8", "ignore_eos=true"]
    server = ["engine=server", "model=tiny", "batch_size=3"]
    server += [f"engine.url={url}/v1", f"engine.regular_url={url}/regular/v1"]
    rows = []
    for settings in ([], server):
        directory = tmp_path / f"run-{len(rows)}"
        harness(*common, *settings, f"hydra.run.dir={directory}")
        prompts = pd.read_csv(directory / "latency_prompts.csv")
        prompts = prompts.sort_values(["arm", "prompt_index"])
        rows.append((pd.read_csv(directory / "latency.csv"), prompts))
    (local, local_prompts), (served_rows, served_prompts) = rows
    assert local_prompts["completion"].tolist() == served_prompts["completion"].tolist()
    for column in ("acceptance_rate", "conditional_acceptance_rate", "acceptance_histogram"):
        assert local[column].tolist()[1] == served_rows[column].tolist()[1], column
