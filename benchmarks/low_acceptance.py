"""Checks whether `acceptance` names the cause of low acceptance, in planted cases and in sound pairs of tiny models.

python benchmarks/low_acceptance.py [NAME ...]

Servers are `harness serve`. For each case (a *world*), the page's finding is printed, and whether it is right: it must
name the planted cause, and for a sound pair it must name none.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from harness.config.installation import PACKAGE
from harness.local.decoding.protocols import Runner, Step
from harness.local.runners.base import Proxy

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
os.environ.setdefault("HARNESS_TESTS_SHARED", tempfile.gettempdir())
from planted_faults import Fault, planted
from served import served
from shipped_copies import SHIPPED

EAGLE = ("model=tiny", "draft=tiny_eagle3")
DRAFT = ("model=tiny", "draft=tiny_draft")
_ASKED = ("prompts=tiny", "n=10", "texts_per_prompt=2", "batch_size=20", "up_to=4")
# The beginnings of sentences that name a cause.
_NAMING = (
    "Explained by",
    "More is accepted",
    "No better than",
    "Cannot tell",
    "Accepts",
    "From draft token",
    "None of the measured causes",
)


class _LateRunner(Proxy):
    """A runner that gives each token the hidden state of the token before it, also at the beginning of a pass."""

    def start(self, prompts: Sequence[Sequence[int]], *options: Any, **named: Any) -> Step:
        step: Step = self._wrapped.start(prompts, *options, **named)
        self._starts: Sequence[int | None] = list(map(len, prompts))
        # The states of prompts are aligned on the right.
        self._hidden = step.hidden[:, -1:]
        return self._late(step, step.hidden[:, :1])

    def extend(self, tokens: Tensor, starts: Sequence[int | None], **named: Any) -> Step:
        step: Step = self._wrapped.extend(tokens, starts, **named)
        before = []
        for hidden, start, last_start in zip(self._hidden, starts, self._starts, strict=True):
            num_kept = 0 if start is None or last_start is None else start - last_start
            before.append(hidden[num_kept - 1])
        self._starts = starts
        self._hidden = step.hidden
        return self._late(step, torch.stack(before).unsqueeze(1))

    def _late(self, step: Step, before: Any) -> Step:
        late = torch.cat([before, step.hidden[:, :-1]], dim=1)
        return step._replace(hidden=late)


class HiddenLate(Fault):
    """A fault: a head gets, for each token, the hidden state of the token before."""

    def runner(self, runner: Runner) -> Runner:
        return _LateRunner(runner)


@dataclass(frozen=True)
class World:
    """A run of `acceptance`.

    Attributes:
        named: part of the sentence that names the planted cause; empty for a sound pair.
        client: settings of the run.
        server: settings of `harness serve`; None for no server.
    """

    named: str
    client: Sequence[str]
    server: Sequence[str] | None = None


def copied(name: str, change: Callable[[Path], object]) -> str:
    """A changed copy of a shipped model or head."""
    directory = Path(tempfile.mkdtemp(prefix="low-acceptance-")) / name
    shutil.copytree(SHIPPED / name, directory)
    change(directory)
    return str(directory)


def configured(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def with_weights(directory: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    tensors = {name: change(name, tensor) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def untrained(directory: Path) -> None:
    torch.manual_seed(0)
    with_weights(directory, lambda name, tensor: 0.02 * torch.randn_like(tensor))


def noisy(directory: Path, *, noise: float = 0.15) -> None:
    """Add noise to the weights, as if the model had been trained in another way."""
    torch.manual_seed(0)
    with_weights(
        directory,
        lambda name, tensor: (
            tensor + noise * tensor.float().std().nan_to_num() * torch.randn_like(tensor)
        ),
    )


def windowed(directory: Path) -> None:
    """Make a draft that only sees the last 12 tokens."""
    mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    configured(directory, **mistral, sliding_window=12)


def reduced(directory: Path, *, wrong: bool = False) -> None:
    """Make a head whose vocabulary lacks the first 60 tokens.

    Args:
        wrong: whether the mapping to the target's vocabulary is missing (all zeros).
    """
    kept = torch.arange(60, 960)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"][kept].clone()
    tensors["d2t"] = torch.zeros(900, dtype=torch.long) if wrong else kept - torch.arange(900)
    save_file(tensors, file, {"format": "pt"})
    configured(directory, draft_vocab_size=900)


def short_range(directory: Path) -> None:
    """Make a draft whose positions are wrongly scaled from token 128 on."""
    factors = [1.0] * 16
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": [40 * factor for factor in factors],
        "original_max_position_embeddings": 128,
        "factor": 1.0,
        "attention_factor": 1.0,
    }
    configured(directory, rope_parameters=rope)


def long_prompts() -> str:
    """Write a file with prompts of about 300 tokens, which consist of several prompts of the set `tiny`."""
    lines = (
        (PACKAGE / "measuring" / "prompts" / "prompt_sets" / "tiny.jsonl").read_text().splitlines()
    )
    texts = [json.loads(line)["prompt"] for line in lines]
    file = Path(tempfile.mkdtemp(prefix="low-acceptance-")) / "long.jsonl"
    prompts = ["\n".join([*texts[index:], *texts[:index]])[:700] for index in range(10)]
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return str(file)


def templated(directory: Path) -> None:
    """Add a chat template that the model was not trained on."""
    file = directory / "tokenizer_config.json"
    template = (
        "{% for m in messages %}## {{ m.role }} @@ 77 @@ {{ m.content }} @@\n## 99 %%{% endfor %}"
    )
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))


def worlds() -> dict[str, World]:
    chat = copied("tiny", templated)
    head, wrong = (copied("tiny_eagle3", lambda d, w=w: reduced(d, wrong=w)) for w in (False, True))
    short = copied("tiny_draft", short_range)
    greedy = ("T=0", "texts_per_prompt=1")
    found = {
        "untrained head": World(
            "untrained", ("model=tiny", f"draft={copied('tiny_eagle3', untrained)}")
        ),
        "temperature": World("with temperature 0", (*EAGLE, "T=1.5", "card=4.4", "K=4")),
        "template": World(
            "without the chat template",
            (f"model={chat}", "draft=tiny_draft", "card=4.12", "K=4"),
        ),
        "long prompts": World(
            "with prompts cut to 64",
            (
                "model=tiny",
                f"draft={short}",
                f"prompts={long_prompts()}",
                "card=3",
                "K=4",
            ),
        ),
        "template of the server": World(
            "the chat template", (f"model={chat}", "draft=tiny_draft", "chat=true"), DRAFT
        ),
        "shifted positions": World(
            "one position late", EAGLE, (*EAGLE, f"engine={__file__}:HiddenLate")
        ),
        "other layers": World("of the last layer", EAGLE, (*EAGLE, "draft.layers=[24,24,24]")),
        "vocabulary mapping": World(
            "read as the target's",
            ("model=tiny", f"draft={head}"),
            ("model=tiny", f"draft={wrong}"),
        ),
        "4-bit target": World(
            "in 4 bit", (*DRAFT, "engine.model=tiny_4bit"), ("model=tiny_4bit", "draft=tiny_draft")
        ),
        "another target": World(
            "another target than tiny",
            DRAFT,
            (f"model={copied('tiny', noisy)}", "draft=tiny_draft"),
        ),
        "last draft token": World(
            "last draft token left out", DRAFT, (*DRAFT, f"engine={planted('LastDropped')}")
        ),
    }
    # No condition that is measured explains these, but the engine accepts 3 to 6 % less than its weights predict. More
    # texts are needed to show this.
    many = (*DRAFT, "texts_per_prompt=4", "batch_size=40", "causes=none")
    for name, change in {"noise": functools.partial(noisy, noise=0.12), "window": windowed}.items():
        draft = copied("tiny_draft", change)
        found[f"draft with {name}"] = World("its weights", many, ("model=tiny", f"draft={draft}"))
    lenient = (*DRAFT, "decoding.rule=google", "decoding.lenience=0.6")
    found["lenience 0.6"] = World("its weights", many, lenient)
    for name in ("tiny_draft", "tiny_eagle3", "tiny_dflash", "tiny_medusa", "lookup"):
        pair = ("model=tiny", f"draft={name}")
        found[f"sound {name}"] = World("", pair, pair)
    for name in ("tiny_draft", "tiny_eagle3"):
        pair = ("model=tiny", f"draft={name}")
        found[f"sound {name}, greedy"] = World("", (*pair, *greedy), pair)
    found["sound greedy drafts"] = World("", (*DRAFT, "T=1"), (*DRAFT, "draft.sampling=greedy"))
    found["sound by its card"] = World("", (*EAGLE, "T=0.5", "card=4.06", "K=4"))
    found["sound reduced vocabulary"] = World(
        "", ("model=tiny", f"draft={head}"), ("model=tiny", f"draft={head}")
    )
    return found


def finding_of(world: World, directory: Path) -> list[str]:
    """The sentences of the finding of a run; the end of stderr if the run has no result."""
    serving = nullcontext("") if world.server is None else served(directory, *world.server)
    with serving as url:
        address = [f"url={url}/v1", "engine=server"] if url else []
        if url and "chat=true" not in world.client:
            address.append("chat=false")
        words = ["harness", "acceptance", *_ASKED, *address, *world.client]
        done = subprocess.run(words, cwd=directory, capture_output=True, text=True)
    results = sorted(directory.rglob("result.json"))
    if not results:
        return [done.stderr[-300:]]
    return list(json.loads(results[-1].read_text())["finding"])


def main() -> None:
    asked = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    right = 0
    chosen = {name: world for name, world in worlds().items() if not asked or name in asked}
    for name, world in chosen.items():
        with tempfile.TemporaryDirectory() as directory:
            finding = finding_of(world, Path(directory))
        naming = [sentence for sentence in finding if sentence.startswith(_NAMING)]
        is_right = any(world.named in text for text in naming) if world.named else not naming
        right += is_right
        print(f"{'right' if is_right else 'WRONG'}  {name}", *finding, sep="\n        ", flush=True)
    print(f"{right} of {len(chosen)}")


if __name__ == "__main__":
    main()
