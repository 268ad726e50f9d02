"""A pair that has learnt a few products by heart, so that every answer and the accuracy of `eval` are known."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from harness.commands.eval.tasks import Problem
from tiny_checkpoints import make_tokenizer

OPERANDS = (1, 3)
QUESTIONS = [(a, b) for a in (1, 2, 3) for b in (1, 2, 3)]
TARGET_SAYS = {(a, b): f" {a * b}" for a, b in QUESTIONS} | {(3, 3): " 8", (2, 3): " six"}
# Disagrees where the target is wrong, and in one product more.
DRAFT_SAYS = {(a, b): f" {a * b}" for a, b in QUESTIONS} | {(1, 2): " 7"}


def save_taught_pair(directory: Path) -> tuple[Path, Path]:
    """Teach target and draft, which takes seconds, and save them below `directory`."""
    paths = directory / "taught", directory / "taught_draft"
    for seed, (path, says) in enumerate(zip(paths, (TARGET_SAYS, DRAFT_SAYS), strict=True)):
        tokenizer = make_tokenizer()
        torch.manual_seed(seed)
        # Learnt positions, because operands that always stand at the same place are then found in a few steps.
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_embd=64,
            n_layer=2,
            n_head=4,
            n_positions=128,
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            initializer_range=0.1,
            bos_token_id=0,
            eos_token_id=1,
        )
        model = GPT2LMHeadModel(config)
        _teach(model, tokenizer, says)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def _teach(model: GPT2LMHeadModel, tokenizer: object, says: dict[tuple[int, int], str]) -> None:
    def prompt(a: int, b: int) -> str:
        return Problem(0, 0, a, b).prompt

    # Padded with line breaks, which lie behind the end of the line; only what follows the prompt is learnt.
    width = len(prompt(1, 1)) + 5
    texts = [f"{prompt(a, b)}{answer}".ljust(width, "\n") for (a, b), answer in says.items()]
    tokens = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    labels = tokens.clone()
    labels[:, : len(prompt(1, 1))] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = model(input_ids=tokens, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 5e-3:
            return
    raise AssertionError(f"the model did not learn its products: loss {loss:.3f}")
