"""Writes conversations with tool calls of the shipped target: `python -m recipes.tiny_trajectories DIRECTORY`.

DIRECTORY then has `target` and `draft`, the shipped pair with a chat template, and `trajectories.jsonl` in OpenAI's
format, for

    harness acceptance model=DIRECTORY/target draft=DIRECTORY/draft prompts=DIRECTORY/trajectories.jsonl

The target writes every turn at the temperature of `decoding=sampled`, after all that precedes it: it goes on with a
story, or writes the next line of a table of products and sums up to the equals sign. Then it has called the tool, which
gives the right number.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import harness
from recipes.tiny_pair.language import story, sums

SHIPPED = Path(harness.__file__).parent / "local" / "models" / "shipped"
PAIR = {"target": "tiny", "draft": "tiny_draft"}
TEMPERATURE = 0.5
# Conversations end before they fill the context of 512 tokens; the pair learnt from 256 at once.
MOST_TOKENS = 400
MOST_IN_A_TURN = 40
# A tool is shown by its description, a call by what is to be computed, and a result by its number.
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
    arguments = parser.parse_args()
    write_trajectories(arguments.directory, arguments.number)


def write_trajectories(directory: Path, number: int) -> None:
    for role, name in PAIR.items():
        shutil.copytree(SHIPPED / name, directory / role, dirs_exist_ok=True)
        (directory / role / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    writer = Writer(directory / "target")
    with (directory / "trajectories.jsonl").open("w", encoding="utf-8") as file:
        for seed in range(number):
            file.write(json.dumps(writer.trajectory(seed)) + "\n")


class Writer:
    """Lets the target write conversations."""

    def __init__(self, checkpoint: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
        self.model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def trajectory(self, seed: int) -> dict[str, Any]:
        """One conversation, of stories and of lines that the tool completes."""
        rng = random.Random(seed)
        torch.manual_seed(seed)
        tool = {"type": "function", "function": {"name": "calculator", "description": "3 + 4 = 7"}}
        messages: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, 3)):
            words = story(rng).split()[: rng.randint(6, 20)]
            messages.append({"role": "user", "content": " ".join(words)})
            messages.append({"role": "assistant", "content": self._next(messages, [tool], "\n")})
            messages.append({"role": "user", "content": sums(rng, rng.choice("*+"), 2)})
            for number in range(rng.randint(2, 8)):
                line = self._next(messages, [tool], "=")
                call = CALL.fullmatch(line)
                if call is None or self._num_tokens(messages, [tool]) > MOST_TOKENS:
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
        return {"messages": messages, "tools": [tool]}

    def _encoded(self, messages: list[dict[str, Any]], tools: list[Any]) -> list[int]:
        for_template = json.loads(json.dumps(messages))
        for message in for_template:
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return list(
            self.tokenizer.apply_chat_template(
                for_template, tools=tools, add_generation_prompt=True, return_dict=False
            )
        )

    def _num_tokens(self, messages: list[dict[str, Any]], tools: list[Any]) -> int:
        return len(self._encoded(messages, tools)) + MOST_IN_A_TURN

    @torch.inference_mode()
    def _next(self, messages: list[dict[str, Any]], tools: list[Any], end: str) -> str:
        """What the target writes next: up to a line break, or an equals sign and with it."""
        read = torch.tensor([self._encoded(messages, tools)])
        cache = None
        written: list[int] = []
        text = ""
        while len(written) < MOST_IN_A_TURN and not text.endswith(("\n", end)):
            step = self.model(read, past_key_values=cache, use_cache=True)
            cache = step.past_key_values
            read = torch.multinomial((step.logits[:, -1] / TEMPERATURE).softmax(-1), 1)
            written.append(int(read))
            text = self.tokenizer.decode(written, skip_special_tokens=True)
        return text.split("\n")[0]


if __name__ == "__main__":
    main()
