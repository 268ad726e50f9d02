"""What the stored files of a draft say of the target that it was made for. What cannot fit was refused before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.local.drafting.heads.stored import read_configuration
from harness.local.drafting.method import Pair
from harness.local.engine.pair import PlannedPair
from harness.local.models.tokenizers import max_context


def trained_length(planned: PlannedPair) -> int | None:
    """Tokens of the longest text that the draft was made for; None where its configuration names none."""
    config: Any = planned.checkpoints[-1].config
    if planned.head is not None:
        config = planned.head.config.transformer
    if config is None:
        return None
    scaling = getattr(config, "rope_parameters", None) or {}
    return scaling.get("original_max_position_embeddings") or max_context(config)


def fitting(planned: PlannedPair, pair: Pair, texts: Sequence[Sequence[int]]) -> str:
    """`hidden size 192, layers 2, 12, 21 of 24, vocabulary of 900 of 960 tokens (98 % of the texts), made for tiny`.

    Args:
        texts: the token ids of the target's answers.
    """
    if pair.head is None or planned.head is None:
        return "the same tokenizer" if planned.shares_tokenizer else "another tokenizer"
    config = planned.head.config
    target: Any = planned.checkpoints[0].config.get_text_config(decoder=True)
    layers = ", ".join(map(str, config.layers))
    parts = [f"hidden size {config.target_size}"]
    parts.append(f"layers {layers} of {target.num_hidden_layers}")
    if pair.head.d2t is not None:
        offsets = pair.head.d2t.tolist()
        known = {token + offset for token, offset in enumerate(offsets)}
        counts = Counter(token for text in texts for token in text)
        share = sum(counts[token] for token in known) / counts.total()
        size = f"{len(offsets)} of {config.vocabulary_size} tokens"
        parts.append(f"vocabulary of {size} ({100 * share:.0f} % of the texts)")
    owners = {True: "its own", False: "the target's"}
    parts.append(f"{owners[config.own_embedding]} embedding and {owners[config.own_output]} output")
    verifier = read_configuration(planned.head.settings).get("speculators_config", {})
    named = verifier.get("verifier", {}).get("name_or_path")
    return ", ".join([*parts, f"made for {named}"] if named else parts)
