"""Kinds of servers (vLLM, llama.cpp and so on): their pages about themselves, their request parameters and their
counters.

The kind of a server is recognised by `owned_by` of the model that requests name or, without it, by the command that
starts the server. Users can set another kind with `engine.dialect`; `./my_server.py:MINE` is a `Dialect` in a user's
own file.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.config.amounts import counted
from harness.config.registry import Record, Registry
from harness.servers.startup import (
    LLAMA_CPP,
    MLX_LM,
    NOT_KNOWN,
    SGLANG,
    VLLM,
    Startup,
)

_LONGEST_VERSION = 60


@dataclass(kw_only=True)
class Dialect(Record):
    """One kind of server.

    Attributes:
        name: `owned_by` of its models; another name if they have none, or for a user's own kind.
        title: its name in tables.
        about: the pages on which it describes itself, and for each page the keys of the entries that do not change
            while it runs.
        version: page and key of its version, such as `/version version`.
        salt: request parameters that keep a prefix cache from reusing the tokens of requests with another salt; None if
            no such parameter is known. The value `{salt}` stands for the salt. Any other value switches the cache off,
            and is therefore left out in later turns of a conversation.
        stops_at_tokens: whether it ends an answer at any of `stop_token_ids`, so that no stop texts are needed.
        words: its names for sampling parameters, by vLLM's names.
        parameters: further entries of every request's body.
        scoring: how it reports the log-probabilities of a given text: `prompt_logprobs`, as vLLM does, or `next_token`,
            with one request per token; None if no way is known.
        counters: for each of its counters, by name without `_total`, the field of `engines.counts.Counts`; or
            `drafted_at` for draft tokens by position.
        counts_in_any_case: for a server that shows counters of drafts only while it speculates, a counter that it
            always shows; otherwise empty.
        counts_within: whether it does not count draft tokens that were accepted beyond the requested number of tokens.
        startup: how its commands are read; `NOT_KNOWN` if harness cannot change them.
    """

    name: str
    title: str
    about: Mapping[str, Sequence[str]] = field(default_factory=dict)
    version: str = ""
    salt: Mapping[str, Any] | None = None
    stops_at_tokens: bool = False
    words: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    scoring: Literal["prompt_logprobs", "next_token"] | None = None
    counters: Mapping[str, str] = field(default_factory=dict)
    counts_in_any_case: str = ""
    counts_within: bool = False
    startup: Startup = NOT_KNOWN

    def named(self, about: Mapping[str, Any]) -> str:
        """The name and version, such as `vLLM 0.32.0`; the title alone if the version is not known. With the number of
        requests that llama.cpp decodes at a time: `llama.cpp b10434, 1 slot`.

        Args:
            about: the server's description of itself, by page and key.
        """
        name = self.title
        version = about.get(self.version)
        if isinstance(version, str) and version.isprintable():
            name = f"{name} {version[:_LONGEST_VERSION]}".strip()
        num_slots = about.get("/props total_slots")
        return f"{name}, {counted(num_slots, 'slot')}" if isinstance(num_slots, int) else name


UNKNOWN_DIALECT = Dialect(name="", title="")

_BUILT_IN = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="vllm",
            title="vLLM",
            startup=VLLM,
            about={"/version": ("version",)},
            counts_in_any_case="vllm:generation_tokens",
            version="/version version",
            salt={"cache_salt": "{salt}"},
            stops_at_tokens=True,
            scoring="prompt_logprobs",
            counters={  # vllm/v1/metrics and vllm/v1/spec_decode/metrics.py
                "vllm:num_requests_running": "running",
                "vllm:num_requests_waiting": "running",
                "vllm:generation_tokens": "generated",
                "vllm:prompt_tokens": "read",
                "vllm:prefix_cache_hits": "cached",
                "vllm:time_to_first_token_seconds_count": "first_tokens",
                "vllm:time_to_first_token_seconds_sum": "first_token_s",
                "vllm:spec_decode_num_drafts": "drafts",
                "vllm:spec_decode_num_draft_tokens": "proposed",
                "vllm:spec_decode_num_accepted_tokens": "accepted",
                "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_at",
            },
        ),
        Dialect(
            name="llamacpp",
            title="llama.cpp",
            startup=LLAMA_CPP,
            about={"/props": ("build_info", "model_path", "total_slots", "chat_template")},
            version="/props build_info",
            salt={"cache_prompt": False},
            words={"repetition_penalty": "repeat_penalty"},
            parameters={
                # This adds the id of its token to each event.
                "verbose": True,
                # This adds the ids to an answer that is not streamed.
                "return_tokens": True,
                # By default, the temperature is applied last, so that top-p would be applied to another distribution.
                "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
            },
            scoring="next_token",
            counts_within=True,
            counters={  # ggml-org/llama.cpp, pull request 26389
                "llamacpp:requests_processing": "running",
                "llamacpp:requests_deferred": "running",
                "llamacpp:tokens_predicted": "generated",
                "llamacpp:prompt_tokens": "read",
                "llamacpp:prompt_tokens_cached": "cached",
                "llamacpp:spec_decode_num_drafts": "drafts",
                "llamacpp:spec_decode_num_draft_tokens": "proposed",
                "llamacpp:spec_decode_num_accepted_tokens": "accepted",
                "llamacpp:spec_decode_num_accepted_tokens_per_pos": "accepted_at",
            },
        ),
        Dialect(
            name="sglang",
            title="SGLang",
            startup=SGLANG,
            about={"/server_info": ("version", "model_path", "speculative_algorithm")},
            version="/server_info version",
            salt={"cache_salt": "{salt}"},
            stops_at_tokens=True,
            counters={  # accepted tokens are computed from generated tokens and verifications
                "sglang:num_running_reqs": "running",
                "sglang:num_queue_reqs": "running",
                "sglang:generation_tokens": "generated",
                "sglang:prompt_tokens": "read",
                "sglang:spec_verify_calls": "drafts",
                "sglang:cached_tokens": "cached",
                "sglang:time_to_first_token_seconds_count": "first_tokens",
                "sglang:time_to_first_token_seconds_sum": "first_token_s",
            },
        ),
        Dialect(
            name="tensorrt_llm",
            title="TensorRT-LLM",
            about={"/version": ("version",)},
            version="/version version",
            counters={  # tensorrt_llm/metrics/collector.py; draft tokens by position, or in total
                "trtllm_num_requests_running": "running",
                "trtllm_num_requests_waiting": "running",
                "trtllm_generation_tokens": "generated",
                "trtllm_prompt_tokens": "read",
                "trtllm_spec_decode_num_draft_tokens": "proposed",
                "trtllm_spec_decode_num_accepted_tokens": "accepted",
                "trtllm_spec_decode_drafted_tokens": "drafted_at",
                "trtllm_spec_decode_accepted_tokens": "accepted_at",
            },
        ),
        # Its list of models has no `owned_by`, so it is known only by its command.
        Dialect(name="mlx_lm", title="mlx_lm.server", startup=MLX_LM),
    )
}


DIALECTS = Registry("engine.dialect", Dialect, _BUILT_IN)


def dialect_of(owned_by: str | None, chosen: str | None) -> Dialect:
    """The dialect of a server, by `owned_by` of its models; `UNKNOWN_DIALECT` if no dialect has this name, or it is
    None.

    Args:
        chosen: the name of a dialect that is used instead (`engine.dialect`); None for none.
    """
    if chosen is not None:
        return DIALECTS[chosen]
    return DIALECTS[owned_by] if owned_by in DIALECTS.names() else UNKNOWN_DIALECT


def known_counters() -> dict[str, str]:
    """The counters of all kinds of servers, as in `Dialect.counters`. All are read from every server, because Dynamo
    forwards the counters of its engines.
    """
    return {
        name: counted for dialect in DIALECTS.known() for name, counted in dialect.counters.items()
    }


def startups() -> list[Startup]:
    """The tables about starting servers (`Dialect.startup`), one for each kind."""
    return [dialect.startup for dialect in DIALECTS.known()]


def known_programs() -> list[str]:
    """The programs that start servers, as they are typed, such as `vllm serve`."""
    every = [program for startup in startups() for program in startup.programs]
    # Without those after `python`, such as `-m mlx_lm.server`.
    return [program for program in every if not program.startswith("-")]


def known_pages() -> dict[str, tuple[str, ...]]:
    """The pages on which servers of any kind describe themselves, with the keys of their entries."""
    pages: dict[str, tuple[str, ...]] = {}
    for dialect in DIALECTS.known():
        for page, keys in dialect.about.items():
            pages[page] = tuple(dict.fromkeys([*pages.get(page, ()), *keys]))
    return pages


def would_show_drafts(generated: str | None) -> bool:
    """Whether a server would have counters of drafts if it speculated, by the name of its counter of generated tokens.

    If such a server has no counters of drafts, it does not speculate. False for None.
    """
    counters = {dialect.counts_in_any_case for dialect in DIALECTS.known()}
    return generated is not None and generated.removesuffix("_total") in counters


def without_port(command: str) -> str:
    """A command that starts a server (`Launch`), without the words for host and port that harness added: without
    ` --host 127.0.0.1 --port '{port}'`.
    """
    for startup in startups():
        # Without such words, every space would be removed.
        if startup.listening:
            command = command.replace(f" {shlex.join(startup.listening)}", "")
    return command
