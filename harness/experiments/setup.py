"""What every command that decodes does between its settings and its first token."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from harness.config.errors import SettingError
from harness.config.settings import ChatTemplate
from harness.experiments.prompts import Prompt
from harness.models.loading import Pair, PlannedPair
from harness.models.tokenizers import encode_prompts, max_context


def encode(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], chat_template: ChatTemplate
) -> list[list[int]]:
    """Token ids of each prompt, through the chat template where the setting and the tokenizer want it."""
    return encode_prompts(tokenizer, [prompt.chat() for prompt in prompts], chat_template)


def check_context(
    planned: PlannedPair, token_ids: Sequence[Sequence[int]], max_new_tokens: int, setting: str = "prompts"
) -> None:
    """Refuse, before weights load, what is longer than a model's context.

    Args:
        setting: where the prompts come from.

    Raises:
        SettingError: for the longest prompt, with the numbers.
    """
    longest = max(range(len(token_ids)), key=lambda index: len(token_ids[index]))
    needed = len(token_ids[longest]) + max_new_tokens
    for checkpoint in planned.checkpoints:
        limit = max_context(checkpoint.config)
        if limit is not None and needed > limit:
            which = f"prompt {longest}" if setting == "prompts" else "it"
            raise SettingError(
                setting,
                f"{which} has {len(token_ids[longest])} tokens; with decoding.max_new_tokens={max_new_tokens} "
                f"that is {needed}, and {checkpoint.role}={checkpoint.settings.name} takes {limit}",
            )


def stop_tokens(pair: Pair) -> frozenset[int]:
    """The token ids at which the target ends a text by itself."""
    configured = pair.target.model.generation_config.eos_token_id if pair.target.model.generation_config else None
    ids = configured if isinstance(configured, list) else [configured, pair.tokenizer.eos_token_id]
    return frozenset(int(token) for token in ids if token is not None)
