"""A pair whose words are known: Llamas of one idle layer, whose output matrix sends every token to its successor.

After a prompt that ends in `a` the target writes `TEXT` and ends, greedily and at any temperature. The draft knows the
same chain but for one word, so that with four draft tokens the origin of every token is known: see `MARKED`.
"""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_checkpoints import make_tokenizer

# 漢 and 字 are three tokens each, half characters until the third; the last word runs from right to left.
WORDS = (" one", " two", " three", " four", " שלום", " end", " won")
CHAIN = ("a", " one", " two", "漢", " three", " four", "字", " שלום", " end")
TEXT = "".join(CHAIN[1:])
# [recovered] where the draft says " won" for " two"; then 漢 and " three" accepted, " four" on top of them as a bonus,
# 字 and " שלום" accepted, " end" as a bonus.
MARKED = " one [two]漢 three {four}字 שלום {end}"


def save_chain_pair(directory: Path, context: int = 512) -> tuple[Path, Path]:
    """Save target and draft below `directory`; both take `context` tokens."""
    tokenizer = make_tokenizer(WORDS)
    size = len(tokenizer)
    ids = [token for part in CHAIN for token in tokenizer(part)["input_ids"]]
    target_next = {token: token for token in range(size)}
    target_next |= dict(zip(ids, [*ids[1:], tokenizer.eos_token_id], strict=True))
    wrong = tokenizer.convert_tokens_to_ids([" one", " won", " two"])
    draft_next = target_next | {wrong[0]: wrong[1], wrong[1]: wrong[2]}
    paths = directory / "chain", directory / "chain_draft"
    for path, successors in zip(paths, (target_next, draft_next), strict=True):
        config = LlamaConfig(
            vocab_size=size,
            hidden_size=size + size % 2,
            intermediate_size=2,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=context,
            bos_token_id=0,
            eos_token_id=1,
        )
        model = LlamaForCausalLM(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1)
            model.model.embed_tokens.weight[:, :size] = torch.eye(size)
            for token, successor in successors.items():
                model.lm_head.weight[successor, token] = 10
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths
