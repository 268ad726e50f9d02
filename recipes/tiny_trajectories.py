"""Makes conversations in which the shipped target calls a tool: `python -m recipes.tiny_trajectories DIRECTORY`.

DIRECTORY then contains `target` and `draft`, the shipped pair with a chat template, and `trajectories.jsonl` in
OpenAI's format, for

    harness acceptance model=DIRECTORY/target draft=DIRECTORY/draft prompts=DIRECTORY/trajectories.jsonl

The target generates each turn from the whole conversation before it, at the temperature of `decoding=sampled`, or
greedily with `--greedy`. It continues a story, or generates the next line of a table of products and sums, up to the
equals sign. Such a line is a call of the tool, which returns the right number.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from harness.engines.protocol import Chat
from harness.local.models.cache_names import cache_name, cache_of
from recipes.tiny_pair.language import story, sums

SHIPPED = Path(harness.__file__).parent / "local" / "models" / "shipped"
PAIR = {"target": "tiny", "draft": "tiny_draft"}
TEMPERATURE = 0.5
# A conversation ends after this many tokens, before it fills the context of 512. The pair was trained on windows of 256
# tokens.
MOST_TOKENS = 400
MOST_IN_A_TURN = 24
# The text of a tool is its description, that of a call its expression, and that of a result its number.
CHAT_TEMPLATE = """\
{%- for tool in tools or [] %}{{ tool.function.description + '\\n' }}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] %}{{ call.function.arguments.expression + ' =' }}{% endfor -%}
{%- if not message.tool_calls %}{{ '\\n' }}{% endif -%}
{%- elif message.role == 'tool' %}{{ ' ' + message.content + '\\n' }}
{%- else %}{{ message.content }}
{%- endif -%}
{%- endfor -%}"""
CALL = re.compile(r"(\d+ [*+] \d+) =")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--greedy", action="store_true")
    arguments = parser.parse_args()
    write_trajectories(arguments.directory, arguments.number, greedy=arguments.greedy)


def write_trajectories(directory: Path, number: int, *, greedy: bool = False) -> None:
    for role, name in PAIR.items():
        shutil.copytree(SHIPPED / name, directory / role, dirs_exist_ok=True)
        (directory / role / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    writer = Writer(directory / "target", greedy=greedy)
    rows = writer.trajectories(number)
    lines = [json.dumps(row) + "\n" for row in rows]
    (directory / "trajectories.jsonl").write_text("".join(lines), encoding="utf-8")


@dataclass
class Wanted:
    """A text that the target is to generate.

    Attributes:
        prompt: the tokens after which it is generated.
        end: the text ends with these characters, or at a line break.
    """

    prompt: list[int]
    end: str


class Writer:
    """Lets the target generate conversations, all of them in one batch."""

    def __init__(self, checkpoint: Path, *, greedy: bool) -> None:
        self.greedy = greedy
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def trajectories(self, number: int) -> list[dict[str, Any]]:
        torch.manual_seed(number)
        conversations = [self.trajectory(random.Random(seed)) for seed in range(number)]
        wanted = {place: next(one) for place, one in enumerate(conversations)}
        rows: dict[int, dict[str, Any]] = {}
        while wanted:
            written = self.written([*wanted.values()])
            for place, text in zip([*wanted], written, strict=True):
                try:
                    wanted[place] = conversations[place].send(text)
                except StopIteration as end:
                    del wanted[place]
                    rows[place] = end.value
        return [rows[place] for place in range(number)]

    def trajectory(self, rng: random.Random) -> Generator[Wanted, str, dict[str, Any]]:
        """A generator for one conversation of stories and of lines that the tool completes.

        It yields each text that the target is to generate, receives the text, and returns the conversation.
        """
        tools = [
            {"type": "function", "function": {"name": "calculator", "description": "3 + 4 = 7"}}
        ]
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 2)):
            words = story(rng).split()[: rng.randint(6, 12)]
            messages.append({"role": "user", "content": " ".join(words)})
            text = yield Wanted(self._encoded(messages, tools), "\n")
            messages.append({"role": "assistant", "content": text})
            messages.append({"role": "user", "content": sums(rng, rng.choice("*+"), 2)})
            for number in range(rng.randint(2, 5)):
                prompt = self._encoded(messages, tools)
                line = yield Wanted(prompt, "=")
                call = CALL.fullmatch(line)
                if call is None or len(prompt) > MOST_TOKENS:
                    break
                expression = call[1]
                function = {
                    "name": "calculator",
                    "arguments": json.dumps({"expression": expression}),
                }
                name = f"call_{number}"
                called = {"id": name, "type": "function", "function": function}
                first, sign, second = expression.split()
                result = int(first) * int(second) if sign == "*" else int(first) + int(second)
                messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
                messages.append({"role": "tool", "tool_call_id": name, "content": str(result)})
        while messages[-1]["role"] != "assistant":
            messages.pop()
        return {"messages": messages, "tools": tools}

    def _encoded(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        chat = Chat(tuple(messages), tuple(tools))
        return list(
            self.tokenizer.apply_chat_template(
                chat.for_template(), tools=tools, add_generation_prompt=True, return_dict=False
            )
        )

    @torch.inference_mode()
    def written(self, wanted: list[Wanted]) -> list[str]:
        """Generate the next text of each conversation."""
        longest = max(len(one.prompt) for one in wanted)
        read = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in wanted])
        is_text = torch.tensor(
            [[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in wanted]
        )
        positions = (is_text.cumsum(1) - 1).clamp(min=0)
        cache = None
        tokens: list[list[int]] = [[] for _ in wanted]
        texts = [""] * len(wanted)
        for _ in range(MOST_IN_A_TURN):
            step = self.model(
                read, attention_mask=is_text, position_ids=positions, use_cache=True, logits_to_keep=1,
                **{cache_name(self.model): cache},
            )  # fmt: skip
            cache = cache_of(step)
            if self.greedy:
                read = step.logits[:, -1:].argmax(-1)
            else:
                read = torch.multinomial((step.logits[:, -1] / TEMPERATURE).softmax(-1), 1)
            is_text = torch.cat([is_text, torch.ones_like(read)], dim=1)
            positions = positions[:, -1:] + 1
            for place, (one, token) in enumerate(zip(wanted, read[:, 0].tolist(), strict=True)):
                if not texts[place].endswith(("\n", one.end)):
                    tokens[place].append(token)
                    texts[place] = self.tokenizer.decode(tokens[place], skip_special_tokens=True)
            if all(text.endswith(("\n", one.end)) for text, one in zip(texts, wanted, strict=True)):
                break
        return [text.split("\n")[0] for text in texts]


if __name__ == "__main__":
    main()
