"""Train the tiny pair that ships with the harness: `python -m recipes.tiny_pair.train OUTPUT_DIRECTORY`.

Both models have Llama's architecture, and share one tokenizer and one language (`language.py`). The target is deep and
thin, so that its step consists of many small kernels, as a large model's step does; the draft has two layers. Training
a deep thin model from nothing is slow. So the target is first trained with few layers, where it learns most of what it
will know. Then it is grown: identity layers (whose output projections are zero) are put between the trained ones, which
does not change what the model computes. Training then continues at full depth. (LLaMA Pro's block expansion does the
same: Wu et al. 2024, arXiv:2401.02415.)

The draft is trained on fewer tokens on purpose, because a draft as good as the target would never be rejected.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from recipes.tiny_pair.language import END_OF_TEXT, documents

VOCABULARY = 960
CONTEXT = 512  # the context in the configuration, in tokens


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        layers: number of layers.
        tokens: number of tokens to train on.
        learning_rate: the highest learning rate.
        products, additions: the shares of documents that are products and additions (see `documents`).
    """

    layers: int
    tokens: int
    learning_rate: float
    products: float
    additions: float
    window: int = 256  # tokens of one row
    rows: int = 32  # rows of one batch
    seed: int = 0


TARGET = [
    Stage(
        layers=4,
        tokens=9_000_000,
        learning_rate=3e-3,
        products=0.60,
        additions=0.10,
        window=128,
        rows=64,
        seed=1,
    ),
    Stage(
        layers=4,
        tokens=5_000_000,
        learning_rate=2e-3,
        products=0.70,
        additions=0.10,
        window=128,
        rows=16,
        seed=4,
    ),
    Stage(
        layers=24,
        tokens=3_600_000,
        learning_rate=1e-3,
        products=0.60,
        additions=0.10,
        window=256,
        rows=8,
        seed=2,
    ),
]
DRAFT = [
    Stage(
        layers=2,
        tokens=5_000_000,
        learning_rate=3e-3,
        products=0.50,
        additions=0.10,
        window=128,
        rows=16,
        seed=3,
    )
]


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = (
        text.removesuffix(END_OF_TEXT) for text in documents(seed=0, products=0.1, additions=0.1)
    )
    tokenizer.train_from_iterator(itertools.islice(sample, 20_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def batches(tokenizer: PreTrainedTokenizerFast, stage: Stage) -> Iterator[torch.Tensor]:
    """Yield token ids [rows, window] of documents that are joined and cut into windows, without end."""
    texts = documents(stage.seed, stage.products, stage.additions)
    size = stage.rows * stage.window
    pending: list[int] = []
    while True:
        while len(pending) < size:
            for ids in tokenizer(list(itertools.islice(texts, 64)))["input_ids"]:
                pending += ids
        yield torch.tensor(pending[:size]).view(stage.rows, stage.window)
        pending = pending[size:]


def new_model(tokenizer: PreTrainedTokenizerFast, layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def grow(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, layers: int
) -> LlamaForCausalLM:
    """A model with `layers` layers that computes the same: each trained layer is followed by copies whose output
    projections are zero.

    Raises:
        ValueError: `layers` is not a multiple of the model's number of layers.
    """
    if layers % model.config.num_hidden_layers:
        raise ValueError(
            f"layers={layers} is no multiple of the model's {model.config.num_hidden_layers}"
        )
    repeat = layers // model.config.num_hidden_layers
    grown = new_model(tokenizer, layers)
    grown.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(model.model.norm.state_dict())
    for index, layer in enumerate(grown.model.layers):
        layer.load_state_dict(model.model.layers[index // repeat].state_dict())
        if index % repeat:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, stage: Stage) -> None:
    """Train a model in place, with AdamW in bfloat16 autocast.

    The learning rate rises over the first 3 % of the steps, and falls to a tenth as a cosine.
    """
    steps = stage.tokens // (stage.rows * stage.window)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    warm_up = max(1, steps * 3 // 100)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=warm_up),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, steps - warm_up, eta_min=stage.learning_rate / 10
            ),
        ],
        [warm_up],
    )

    @torch.compile
    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten()
        )

    model.train()
    started = time.perf_counter()
    for step, ids in enumerate(itertools.islice(batches(tokenizer, stage), steps), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(ids)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == steps:
            speed = step * ids.numel() / (time.perf_counter() - started)
            print(
                f"{stage.layers} layers  step {step}/{steps}  loss {loss.item():.4f}  {speed:,.0f} tokens/s",
                flush=True,
            )
    model.eval()


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: int = 500
) -> float:
    """The share of products that the model answers correctly with greedy decoding, after the three solved products of
    the evaluation in MISSION.md.
    """
    generator = torch.Generator().manual_seed(0)
    operands = torch.randint(1, 100, (questions, 2), generator=generator).tolist()
    right = 0
    by_length: dict[int, list[tuple[list[int], str]]] = {}
    for a, b in operands:
        ids = tokenizer(f"8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n{a} * {b} =")["input_ids"]
        by_length.setdefault(len(ids), []).append((ids, f" {a * b}"))
    for group in by_length.values():
        ids = torch.tensor([question for question, _ in group])
        answers = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False
        )[:, ids.shape[1] :]
        for answer, (_, expected) in zip(answers, group, strict=True):
            right += tokenizer.decode(answer).split("\n")[0] == expected
    return right / questions


def rounded(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The model with weights that are rounded to bfloat16, as they will be stored, but kept in float32."""
    return model.to(torch.bfloat16).float()


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write the model in bfloat16, which takes half the bytes, and the tokenizer."""
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "output", type=Path, help="a directory; tiny/ and tiny_draft/ are written below it"
    )
    parser.add_argument("--only", choices=["target", "draft"], help="train one of the two")
    arguments = parser.parse_args()
    tokenizer = train_tokenizer()
    for name, stages, role in [("tiny", TARGET, "target"), ("tiny_draft", DRAFT, "draft")]:
        if arguments.only not in (None, role):
            continue
        torch.manual_seed(stages[0].seed)
        model = new_model(tokenizer, stages[0].layers)
        for stage in stages:
            if stage.layers != model.config.num_hidden_layers:
                model = grow(model, tokenizer, stage.layers)
            train(model, tokenizer, stage)
            print(
                f"{name}: {accuracy(model, tokenizer):.1%} of the products right after {stage.layers} layers",
                flush=True,
            )
            model = rounded(model)
        save(model, tokenizer, arguments.output / name)


if __name__ == "__main__":
    main()
