"""How often is a healthy drafter said to accept less than its weights say, and is each of five faults?

    python benchmarks/drafter_health.py [--runs 20] [--prompts 40] [--tokens 64] [--only NAME]
    python benchmarks/drafter_health.py --save-quantized DIRECTORY
    python benchmarks/drafter_health.py --fault-file FILE --url URL --head-url URL --quantized-url URL

Each run decodes the prompts at K=4 with a pair, honest or with a planted fault, and judges the iterations by the
weights of the honest one, as `acceptance engine=server` does: a draft of five values per weight, a head that reads the
target's states of the token before, a window that is read as full attention, positions that count double, another chat
template.

With addresses servers of vLLM's decode, which run already (benchmarks/RESULTS.md has the commands): with the tiny
draft, with `tiny_eagle3`, and with the quantized draft, because vLLM packs weights as it loads them. The others' faults
are those of `faulty_vllm.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import shutil
import tempfile
from argparse import Namespace
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import common
from acceptance_reference import answered

import harness
from harness.commands.acceptance.health import health_columns
from harness.engines.door.reading import Transcript
from harness.local.drafting.heads.unread import UnreadFeatures
from harness.local.engine.pair import Pair
from harness.local.engine.reading import PairReader
from harness.results.files import read_rows
from harness.results.rows.acceptance import AcceptanceRow

K = 4
SHIPPED = Path(__file__).parents[1] / "harness" / "local" / "models" / "shipped"


def quantized(pair: Pair) -> Pair:
    """The pair with a draft of five values per weight."""
    assert pair.draft is not None
    model = copy.deepcopy(pair.draft.model)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            step = parameter.data.abs().amax(1, keepdim=True) / 2
            parameter.data = (parameter.data / step).round() * step
    return dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, model=model))


def shifted(pair: Pair) -> Pair:
    """The pair with a draft whose positions count double."""
    assert pair.draft is not None
    model = copy.deepcopy(pair.draft.model)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq * 2
    return dataclasses.replace(pair, draft=dataclasses.replace(pair.draft, model=model))


def with_window(directory: str) -> str:
    """The draft with a sliding window of four tokens."""
    copied = Path(directory) / "windowed"
    shutil.copytree(SHIPPED / "tiny_draft", copied)
    config = json.loads((copied / "config.json").read_text())
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4}
    (copied / "config.json").write_text(json.dumps(config | window))
    return str(copied)


def main() -> None:
    parser = common.parser(__doc__, runs=20, prompts=40, tokens=64)
    parser.add_argument("--only", help="of the names below")
    parser.add_argument("--url", help="of vLLM's server with the tiny draft")
    parser.add_argument("--head-url", help="of the one with the head")
    parser.add_argument("--quantized-url", help="of one with the draft of --save-quantized")
    parser.add_argument("--fault-file", type=Path, help="that all of them read")
    parser.add_argument("--save-quantized", help="a directory for that draft")
    options = parser.parse_args()
    if options.fault_file is not None:
        of_vllm(options)
        return
    settings = common.cpu_settings(options)
    decoding = dataclasses.replace(
        settings.decoding, max_new_tokens=options.tokens, ignore_eos=True, num_draft_tokens=K
    )
    pair = common.load(settings)
    if options.save_quantized is not None:
        draft = quantized(pair).draft
        assert draft is not None
        shutil.copytree(SHIPPED / "tiny_draft", options.save_quantized)
        draft.model.save_pretrained(options.save_quantized)
        return
    options.draft = "tiny_eagle3"
    of_head = common.load(common.cpu_settings(options))
    with tempfile.TemporaryDirectory() as directory:
        options.draft = with_window(directory)
        windowed = common.load(common.cpu_settings(options))
    prompts = common.read_prompts(settings, pair, options.prompts)
    further = pair.tokenizer(" Once more:")["input_ids"]
    in_template = [[*prompt, *further] for prompt in prompts]

    def of_token_before(features: UnreadFeatures, name: str) -> mock._patch[object]:
        original = getattr(features, name)
        return mock.patch.object(
            features, name, lambda self, hidden, *rest: original(self, hidden.roll(1, 1), *rest)
        )

    # Name: who decodes, the prompts that it sees, and whose weights judge.
    cases = {
        "honest": (pair, prompts, pair),
        "honest head": (of_head, prompts, of_head),
        "quantized": (quantized(pair), prompts, pair),
        "off by one": (of_head, prompts, of_head),
        "without its window": (pair, prompts, windowed),
        "shifted": (shifted(pair), prompts, pair),
        "other template": (pair, in_template, pair),
    }
    for name, (decoding_pair, shown, judge) in cases.items():
        if options.only not in (None, name):
            continue
        with ExitStack() as stack:
            if name == "off by one":
                for method in ("observe", "add"):
                    stack.enter_context(of_token_before(UnreadFeatures, method))
            answers = answered(decoding_pair, shown, decoding, K, options.runs)
        reader = PairReader(judge, decoding, K)
        verdicts: Counter[str] = Counter()
        for first in range(0, len(answers), len(prompts)):
            requests = answers[first : first + len(prompts)]
            texts = [request.token_ids for request in requests]
            read = [text for [text] in reader.read(map(Transcript.of, prompts, texts))]
            verdicts[health_columns({"": read}, requests, K)["health"]] += 1
        reader.close()
        print(f"{name}: {dict(verdicts)}", flush=True)


def of_vllm(options: Namespace) -> None:
    """The same of vLLM's servers, whose drafters are wrong in the way that the file says."""
    with tempfile.TemporaryDirectory() as directory:
        # Name: who decodes, the fault, and whose weights judge.
        cases = {
            "honest": (options.url, "none", "tiny_draft"),
            "honest head": (options.head_url, "none", "tiny_eagle3"),
            "quantized": (options.quantized_url, "none", "tiny_draft"),
            "off by one": (options.head_url, "off_by_one", "tiny_eagle3"),
            "without its window": (options.url, "none", with_window(directory)),
            "shifted": (options.url, "shifted", "tiny_draft"),
            "other template": (options.url, "other_template", "tiny_draft"),
            "as built": (options.url, "as_built", "tiny_draft"),
        }
        for name, (url, fault, judge) in cases.items():
            if options.only not in (None, name) or url is None:
                continue
            options.fault_file.write_text(fault)
            file = Path(directory) / f"{name}.csv"
            for run in range(options.runs):
                settings = [
                    *["engine=server", f"engine.url={url}", "model=tiny", f"draft={judge}"],
                    *[f"K={K}", f"up_to={K}", f"num_prompts={options.prompts}"],
                    *["texts_per_prompt=1", "batch_size=16", "decoding.ignore_eos=true"],
                    *[f"decoding.max_new_tokens={options.tokens}", f"seed={run}"],
                    *[f"results.file={file}", f"hydra.run.dir={directory}/{name}/{run}"],
                ]
                # A verdict that is not the good one is an error; its rows are in the file.
                with contextlib.suppress(harness.HarnessError):
                    harness.run("acceptance", *settings)
            rows = [row for row in read_rows(file, AcceptanceRow) if row.health is not None]
            verdicts = Counter(row.health for row in rows)
            served = [row.served_tokens_per_iteration or 0.0 for row in rows]
            allowed = [row.weights_tokens_per_iteration for row in rows]
            estimates = [one.estimate for one in allowed if one is not None]
            print(
                f"{name}: {dict(verdicts)}, {min(served):.2f} to {max(served):.2f} tokens per iteration,"
                f" by the weights {min(estimates):.2f} to {max(estimates):.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
