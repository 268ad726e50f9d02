"""Train the heads that ship for the tiny model: `python -m recipes.tiny_heads OUTPUT_DIRECTORY`.

Each new head has the shape of the one that ships, begins with random weights, and learns from the model's own answers
to beginnings of texts in the pair's language. Texts that contain a question of the prompt set `tiny` are left out. For
other models use a trainer such as speculators or SpecForge; `draft=` reads their heads.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness.config.installation import PACKAGE
from harness.config.settings import ModelSettings
from harness.local.drafting.heads.checkpoint import read_head
from harness.local.drafting.heads.head import Head
from harness.local.drafting.heads.medusa import Medusa
from harness.local.models.checkpoints import read_checkpoint
from harness.local.runners.base import Options, chosen_outputs, hidden_arguments
from recipes.head_losses import Batch, loss_of
from recipes.tiny_pair.language import END_OF_TEXT, documents

SHIPPED = PACKAGE / "local" / "models" / "shipped"
EPOCHS = {"eagle3": 8, "dflash": 7, "medusa": 7}
TEMPERATURES = (0.0, 0.6)
ANSWER_TOKENS = 121
TEXTS_PER_STEP = 16
LEARNING_RATE = 0.002


@dataclass(frozen=True)
class Text:
    """A prompt with the model's answer.

    Attributes:
        tokens: the tokens of the prompt and of the answer.
        prompt_length: number of tokens of the prompt.
    """

    tokens: list[int]
    prompt_length: int


def held_out() -> list[str]:
    """The questions of the prompt set `tiny`: the beginning of each story, and the sum after each prompt's solved
    examples.
    """
    file = PACKAGE / "measuring" / "prompts" / "prompt_sets" / "tiny.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"].splitlines()[-1] for line in lines]


def prompts(count: int) -> list[str]:
    """Beginnings of stories, products and sums, with up to twenty words."""
    rng = random.Random(5)
    asked = held_out()
    begun = []
    texts = documents(seed=5, products=0.25, additions=0.15)
    unseen = (text for text in texts if not any(question in text for question in asked))
    for text in islice(unseen, count):
        words = text.removesuffix(END_OF_TEXT).split(" ")
        begun.append(" ".join(words[: rng.randint(2, min(20, len(words) - 1))]))
    return begun


def load_target() -> Any:
    """The tiny model in float32."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / "tiny", dtype=torch.float32)
    # Let answers continue after the end of a text.
    model.generation_config.eos_token_id = None
    return model.eval().requires_grad_(False)


def answered(target: Any, asked: Sequence[str], answer_tokens: int = ANSWER_TOKENS) -> list[Text]:
    """The texts of all prompts with the model's answers, one for each temperature."""
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / "tiny", padding_side="left")
    texts = []
    torch.manual_seed(0)
    for temperature in TEMPERATURES:
        how: dict[str, Any] = {"do_sample": temperature > 0}
        if temperature > 0:
            how |= {"temperature": temperature, "top_k": 0}
        for first in range(0, len(asked), TEXTS_PER_STEP):
            batch = tokenizer(
                asked[first : first + TEXTS_PER_STEP], padding=True, return_tensors="pt"
            )
            mask = batch["attention_mask"]
            written = target.generate(
                input_ids=batch["input_ids"],
                attention_mask=mask,
                max_new_tokens=answer_tokens,
                pad_token_id=tokenizer.pad_token_id,
                **how,
            )
            lengths = mask.sum(1).tolist()
            for row, length in zip(written.tolist(), lengths, strict=True):
                texts.append(Text(row[-answer_tokens - length :], length))
        print(f"{len(texts)} answers", flush=True)
    return texts


@torch.no_grad()
def batch_of(target: Any, texts: Sequence[Text], layers: Sequence[int]) -> Batch:
    """The target's outputs for texts, which are padded on the right.

    Only distributions of answer tokens are learned. For a prompt of 3 tokens and an answer of 2, these are the
    distributions after tokens 2 and 3, counted from 0.
    """
    width = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), width, dtype=torch.long)
    is_learned = torch.zeros(len(texts), width, dtype=torch.bool)
    for row, text in enumerate(texts):
        length = len(text.tokens)
        tokens[row, :length] = torch.tensor(text.tokens)
        is_learned[row, text.prompt_length - 1 : length - 1] = True
    options: Options = {"hidden_layers": tuple(layers)}
    logits, hidden = chosen_outputs(options, target(input_ids=tokens, **hidden_arguments(options)))
    return Batch(tokens, is_learned, logits.float().softmax(-1), hidden.flatten(2).float())


def new_head(kind: str, target: Any) -> Head:
    """A head with the shape of the shipped one, and with the weights at the start of training.

    A matrix with the shape of the target's output matrix begins as a copy of it. Medusa's blocks begin as identities.
    All other matrices are random.
    """
    tiny = read_checkpoint("model", ModelSettings(name="tiny", repository=str(SHIPPED / "tiny")))
    settings = ModelSettings(name=kind, repository=str(SHIPPED / f"tiny_{kind}"))
    checkpoint = read_head(settings, tiny)
    assert checkpoint is not None
    head = checkpoint.load(torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    output = target.get_output_embeddings().weight
    for name, parameter in head.named_parameters():
        is_of_block = isinstance(head, Medusa) and ".linear." in name
        if parameter.shape == output.shape:
            parameter.data.copy_(output)
        elif is_of_block or name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif parameter.dim() == 1:
            nn.init.ones_(parameter)
        else:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return head


def rate(step: int, num_steps: int) -> float:
    """The learning rate of a step: it rises over the first 3 % of the steps, and falls to a tenth as a cosine."""
    warm_up = max(1, num_steps * 3 // 100)
    cosine = 0.55 + 0.45 * math.cos(math.pi * step / num_steps)
    return LEARNING_RATE * min((step + 1) / warm_up, cosine)


def train(head: Head, target: Any, texts: Sequence[Text], epochs: int) -> list[float]:
    """Train a head in place, and return the loss of each step. Each epoch has all batches, in a new order."""
    head.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    torch.manual_seed(0)
    shuffled = [texts[place] for place in torch.randperm(len(texts)).tolist()]
    starts = range(0, len(texts), TEXTS_PER_STEP)
    num_steps = epochs * len(starts)
    losses: list[float] = []
    for _ in range(epochs):
        for place in torch.randperm(len(starts)).tolist():
            for group in optimizer.param_groups:
                group["lr"] = rate(len(losses), num_steps)
            step_texts = shuffled[starts[place] : starts[place] + TEXTS_PER_STEP]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(
                    head, target, batch_of(target, step_texts, head.config.target_layers)
                )
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
        print(f"{len(losses)} of {num_steps} steps, loss {losses[-1]:.3f}", flush=True)
    head.eval().requires_grad_(False)
    return losses


def save(head: Head, kind: str, directory: Path) -> None:
    """Write the weights in bfloat16 and the configuration into one directory, which `draft=` can read."""
    shipped = SHIPPED / f"tiny_{kind}"
    (weights,) = shipped.glob("*.safetensors")
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: tensor.to(torch.bfloat16).contiguous() for name, tensor in head.state_dict().items()
    }
    save_file(state, directory / weights.name, metadata={"format": "pt"})
    shutil.copy(shipped / "config.json", directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "output", type=Path, help="a directory; tiny_eagle3/ and the others go below it"
    )
    parser.add_argument("--only", choices=[*EPOCHS], help="train one of them")
    parser.add_argument("--prompts", type=int, default=900, help="how many to learn from")
    arguments = parser.parse_args()
    target = load_target()
    texts = answered(target, prompts(arguments.prompts))
    for kind in [arguments.only] if arguments.only else EPOCHS:
        head = new_head(kind, target)
        train(head, target, texts, EPOCHS[kind])
        directory = arguments.output / f"tiny_{kind}"
        save(head, kind, directory)
        print(f"measure it: harness latency draft={directory.absolute()}", flush=True)


if __name__ == "__main__":
    main()
