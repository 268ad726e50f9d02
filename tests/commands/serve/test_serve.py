"""The service over a real socket, with the real openai client."""

from __future__ import annotations

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
def service(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[str, Forked]]:
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
    assert post(url, "/predict", {"prompt": "a", "top_p": 0.5}).status_code == 400


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


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {"prompt": "a", "top_p": 0}, "top_p"),
        ("completions", {"prompt": "\ud800"}, "prompt: must be text"),
        ("completions", {"prompt": [[5, True]]}, "prompt.0.1: Input should be a valid integer"),
        ("completions", {"prompt": "a", "max_tokens": "4"}, "max_tokens: "),
        ("completions", {"prompt": "a", "max_tokens": 10_000}, "at most 256"),
        ("completions", {"prompt": "word " * 300}, "at most 256"),
        ("completions", {"prompt": [5, 960]}, "does not exist"),
        ("completions", {"prompt": ["a"] * 13}, "at most 12"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"role": "judge", "content": "a"}]}, "role"),
    ],
)  # fmt: skip
def test_errors_say_what_is_wrong(url: str, path: str, body: Any, says: str) -> None:
    headers = {"Content-Type": "application/json"}
    answer = CLIENT.post(f"{url}/v1/{path}", content=json.dumps(body), headers=headers)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    message = error["message"]
    assert says in message
    assert "[" not in message
    assert error["param"] in (None, message.partition(": ")[0])


def test_bodies_that_are_no_json_or_too_large(url: str) -> None:
    headers = {"Content-Type": "application/json"}
    deep = "[" * 100_000
    long = '{"prompt": "%s"}' % ("a" * 2_000_000)
    for content, status in (("{", 400), (deep, 400), ("9" * 5000, 400), (long, 413)):
        answer = CLIENT.post(f"{url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == status
    form = CLIENT.post(f"{url}/predict", content='{"prompt": "x"}')
    assert "body: must be JSON: send content-type: application/json" in form.text
    other = {"Content-Type": "text/plain; application/json"}
    answer = CLIENT.post(f"{url}/v1/completions", content='{"prompt": "x"}', headers=other)
    assert "body: must be JSON: send content-type: application/json" in answer.text
    chunked = CLIENT.post(f"{url}/v1/completions", content=iter([b"{}"]), headers=headers)
    assert chunked.status_code == 411
    assert CLIENT.get(f"{url}/nowhere").json()["error"]["type"] == "invalid_request_error"


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


@pytest.mark.parametrize(
    ("parameter", "value"),
    [("min_p", 1), ("n", True), ("never_heard_of", 0), ("stream_options", {"include_usage": True}),
     ("model", "another")],
)  # fmt: skip
def test_a_parameter_that_would_be_ignored_is_refused(url: str, parameter: str, value: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", chat)):
        answer = post(url, path, {**body, "max_tokens": 2, parameter: value})
        assert answer.status_code in (400, 404), answer.text
        message = answer.json()["error"]["message"]
        assert message.startswith(f"{parameter}: ")
        assert "\n" not in message


def test_parameters_that_change_nothing_are_accepted(url: str) -> None:
    neutral = {
        "model": "tiny", "n": 1, "best_of": 1, "echo": False, "logprobs": None, "frequency_penalty": 0.0, "min_p": 0,
        "repetition_penalty": 1.0, "logit_bias": {}, "suffix": None, "user": "somebody", "metadata": {"a": 1},
    }  # fmt: skip
    answer = post(url, "/v1/completions", {"prompt": "a", "max_tokens": 2, **neutral})
    assert answer.status_code == 200, answer.text


def test_a_race(url: str) -> None:
    body = {"prompt": PROMPTS[0], "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    race = post(url, "/race", body).json()
    assert [arm["name"] for arm in race["arms"]] == ["regular", "speculative"]
    assert race["identical"]
    times = [step["at"] for step in race["arms"][1]["steps"]]
    assert times == sorted(times)
    assert times[-1] <= race["arms"][1]["seconds"]
    tokens = [token for step in race["arms"][1]["steps"] for token in step["tokens"]]
    assert {token["origin"] for token in tokens if "rejection" in token} == {"recovered"}
    refused = post(url, "/race", {**body, "stop": "a"})
    assert (refused.status_code, "stop: " in refused.text) == (400, True)


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
