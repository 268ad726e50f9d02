"""The parameters beyond OpenAI's API with which each kind of server is asked.

A kind is known by `owned_by` of the first model in the server's list: `vllm`, `llamacpp`,
`harness`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# Servers whose requests have a `cache_salt`: a prefix cache answers those with an equal one alone.
_SALTED = ("vllm", "sglang", "tensorrt_llm")
_LLAMA_CPP = "llamacpp"
# Servers that end an answer at any of `stop_token_ids`.
_STOP_AT_TOKENS = (*_SALTED, "harness")
# OpenAI's API takes no more texts to stop at.
_MOST_STOPS = 4
# llama.cpp's own names.
_LLAMA_CPP_NAMES = {"repetition_penalty": "repeat_penalty"}
_LLAMA_CPP_PARAMETERS: Mapping[str, Any] = {
    # Each event then has the id of its token.
    "verbose": True,
    # By default the temperature comes last, so that top-p cuts another distribution.
    "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
}


def past_the_cache(owned_by: str | None, salt: str) -> dict[str, Any] | None:
    """Parameters that keep a prefix cache from answering a request that was sent under another
    salt.

    None for a kind of server whose parameter is not known.
    """
    if owned_by in _SALTED:
        return {"cache_salt": salt}
    if owned_by == _LLAMA_CPP:
        return {"cache_prompt": False}
    # Our own server caches nothing between requests.
    return {} if owned_by == "harness" else None


def in_words_of(
    owned_by: str | None, parameters: Mapping[str, Any], num_tokens: int
) -> dict[str, Any]:
    """Parameters by vLLM's names, renamed for a server, and those by which it understands them
    alike.

    Args:
        num_tokens: of the prompt and the longest answer.
    """
    if owned_by != _LLAMA_CPP:
        return dict(parameters)
    renamed = {_LLAMA_CPP_NAMES.get(name, name): value for name, value in parameters.items()}
    # By default penalties count the last 64 tokens alone.
    return {**_LLAMA_CPP_PARAMETERS, "repeat_last_n": num_tokens, **renamed}


def stops(owned_by: str | None, ends: Sequence[str]) -> dict[str, Any]:
    """The parameter for texts that end an answer, for servers that take no `stop_token_ids`."""
    if not ends or owned_by in _STOP_AT_TOKENS:
        return {}
    return {"stop": list(ends[:_MOST_STOPS])}


def penalises_prompts(owned_by: str | None) -> bool:
    """Whether presence and frequency penalties count the tokens of the prompt, too."""
    return owned_by == _LLAMA_CPP
