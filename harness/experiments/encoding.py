"""Prompts of a set as token ids; those that are too long are refused, skipped or cut."""

from __future__ import annotations

from harness.config.run import PromptedSettings
from harness.engines.pair import PlannedPair
from harness.experiments.progress import say
from harness.experiments.prompts import Prompt, PromptSet, listed
from harness.models.tokenizers import encode_prompts


def encode_set(
    planned: PlannedPair,
    settings: PromptedSettings,
    prompt_set: PromptSet,
    prompts: tuple[Prompt, ...],
    new_tokens: int,
) -> tuple[tuple[Prompt, ...], list[list[int]], dict[str, int]]:
    """The prompts that are measured, their token ids, and how many were skipped or truncated, by column.

    Raises:
        SettingError: a prompt that does not fit into a model's context with the `new_tokens` that follow it, where
            `prompts.too_long` does not say what to do, or nothing would be left.
    """
    too_long, template = settings.prompts.too_long, settings.chat_template
    counts = {"num_skipped": 0, "num_truncated": 0}
    chats = [prompt.chat() for prompt in prompts]
    token_ids = encode_prompts(planned.tokenizer, chats, template)
    room = planned.room(new_tokens)
    long = [place for place, ids in enumerate(token_ids) if room is not None and len(ids) > room]
    lines = listed(sorted(prompts[place].line for place in long))
    found = f"{len(long)} of {len(prompts)} prompts are too long (line{'s' * (len(long) > 1)} {lines} of the file)"
    if too_long == "skip" and 0 < len(long) < len(prompts):
        say(f"{found} and are left out")
        kept = sorted(set(range(len(prompts))).difference(long))
        prompts, token_ids = (
            tuple(prompts[place] for place in kept),
            [token_ids[place] for place in kept],
        )
        counts["num_skipped"] = len(long)
    elif too_long == "truncate" and long and room is not None and room > 1:
        say(f"{found}: their last {room} tokens are read")
        for place in long:
            token_ids[place] = _last(token_ids[place], room, planned.tokenizer.bos_token_id)
        counts["num_truncated"] = len(long)
    else:
        advice = "; prompts.too_long=skip leaves them out, truncate reads their last tokens"
        planned.check_context(
            token_ids, new_tokens, said=f"{found}; the longest has {{}} tokens; ", advice=advice
        )
    if described := prompt_set.described(prompts):
        say(described)
    if template == "never" and (num_chats := sum(len(chat) > 1 for chat in chats)):
        say(f"chat_template=never: {num_chats} chats are read as text, every message with its role")
    return prompts, token_ids, counts


def _last(tokens: list[int], count: int, first: int | None) -> list[int]:
    """The last of them; behind the token that every text begins with, if this one does."""
    return [*tokens[:1], *tokens[1 - count :]] if tokens[0] == first else tokens[-count:]
