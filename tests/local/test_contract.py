"""The contract of every model, every draft and every batch: greedy texts are those of `generate`, drawn ones follow the
target's distribution, and a row gets what it gets alone, up to its length.
"""

from collections.abc import Callable

import pytest
import torch
from scipy import stats
from transformers import PreTrainedModel

from architectures import (
    ARCHITECTURES,
    NOT_STATIC,
    ONE_BY_ONE,
    PROMPTS,
    RECURRENT,
    generated,
    random_model,
    random_pair,
)
from chains import GREEDY, autoregressive, decoded, requests, row_steps, speculative, texts
from drafts import DRAFTS
from harness.local.decoding.iteration import Calls
from harness.local.decoding.loop import Loop, RowRequest
from harness.local.decoding.protocols import Drafter, Runner
from harness.local.decoding.randomness import uniforms
from harness.local.decoding.verify import Verdict, verify, verify_block
from harness.local.decoding.warp import BatchWarp, Warp
from harness.local.drafting.model import ModelDrafter
from harness.local.runners.snapshot import SnapshotRunner
from harness.local.runners.static import StaticRunner
from verifiers import FALSE_ALARM_RATE, without_residual

LENGTH, K = 14, 3
# After it the likely tokens of a target are likely for most drafts, too.
REPETITIVE = [4, 8, 4, 8, 5, 4, 8, 5]
MODELS = [*ARCHITECTURES, *RECURRENT]


def check_greedy(target: PreTrainedModel, runner: Runner, drafter: Drafter) -> list[int]:
    """One row, then several of different lengths with the same drafter; how many tokens were accepted each time."""
    expected = [generated(target, prompt, LENGTH) for prompt in PROMPTS]
    accepted = []
    for number in (1, len(PROMPTS)):
        what = requests(PROMPTS[:number], GREEDY, LENGTH)
        iterations = list(speculative(runner, drafter, what, K))
        assert texts(iterations, number) == expected[:number]
        accepted += [
            row_step.num_accepted for row_step in row_steps(iterations) if row_step.proposed
        ]
    return accepted


@pytest.mark.parametrize("name", MODELS)
def test_greedy_texts_of_every_model_are_those_of_generate(name: str) -> None:
    target, draft = random_pair(name)
    runner = SnapshotRunner(target, keeps_first=True)
    runner.check(len(PROMPTS))
    accepted = check_greedy(target, runner, ModelDrafter(SnapshotRunner(draft), GREEDY))
    assert min(accepted) < K, "something is rejected"
    assert max(accepted) > 0


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_texts_with_every_draft_are_those_of_generate(name: str) -> None:
    target, drafter = DRAFTS[name](GREEDY)
    check_greedy(target, StaticRunner(target, hidden_layers=drafter.layers), drafter)


# That a cache of fixed size gives every other model's logits: tests/local/runners/test_protocol.py.
@pytest.mark.parametrize("name", ["llama", "bloom", *RECURRENT, *ONE_BY_ONE])
def test_regular_texts_are_those_of_generate(name: str) -> None:
    model = random_model(name)
    expected = [generated(model, prompt, LENGTH) for prompt in PROMPTS]
    runner: Runner = SnapshotRunner(model, rolls_back=False)
    if name in ARCHITECTURES and name not in NOT_STATIC:
        runner = StaticRunner(model)
    number = 1 if name in ONE_BY_ONE else len(PROMPTS)
    what = requests(PROMPTS[:number], GREEDY, LENGTH)
    assert texts(autoregressive(runner, what), number) == expected[:number]
    assert len({token for text in expected for token in text}) > 2, "one token shows nothing"


def p_value(name: str, rule: Callable[..., Verdict], num_rows: int = 1500) -> float:
    """Chi-square over the first three tokens after one prompt, of which each is one of three."""
    warp = Warp(1.0, top_k=3)
    target, drafter = DRAFTS[name](warp)
    runner = StaticRunner(target, hidden_layers=drafter.layers)
    what = requests([REPETITIVE] * num_rows, warp, 3)
    drawn = texts(speculative(runner, drafter, what, 2, verification=rule), num_rows)
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        beginnings = torch.tensor([[*REPETITIVE, *text] for text in exact])
        following = warp(target(beginnings, use_cache=False).logits[:, -1])
        exact = {
            (*text, token): chance * float(row[token])
            for (text, chance), row in zip(exact.items(), following, strict=True)
            for token in row.nonzero().flatten().tolist()
        }
    counts = dict.fromkeys(exact, 0)
    for text in drawn:
        counts[tuple(text)] += 1
    expected = [num_rows * chance / sum(exact.values()) for chance in exact.values()]
    return float(stats.chisquare(list(counts.values()), expected).pvalue)


# Lookup needs texts that it knows: its own file has those.
@pytest.mark.parametrize("rule", [verify, without_residual])
@pytest.mark.parametrize("name", ["model", "EAGLE-3", "DFlash", "Medusa", "MTP"])
def test_drawn_texts_follow_the_target_and_those_of_a_broken_verifier_do_not(
    name: str, rule: Callable[..., Verdict]
) -> None:
    assert (p_value(name, rule) > FALSE_ALARM_RATE) == (rule is verify)


WARPS = [Warp(0), Warp(0.8), Warp(1.0, top_k=20), Warp(0)]
Texts = dict[int, list[tuple[int, str]]]


def different_requests() -> list[RowRequest]:
    """Requests of several lengths, settings and places in the stream of random numbers."""
    asked = []
    for number, length in enumerate([18, 9, 1, 12, 12, 25, 7, 14]):
        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(40, (1 + 3 * number % 8,), generator=generator).tolist()
        numbers = uniforms(0, 10 * number, (length + 1) * (K + 1))
        asked.append(RowRequest(prompt, numbers, WARPS[number % len(WARPS)], length))
    return asked


def collect(loop: Loop, asked: list[RowRequest]) -> Texts:
    """The tokens of each row with their origins."""
    texts: Texts = {}
    for row_step in row_steps(decoded(loop, asked)):
        tokens = zip(row_step.tokens, map(str, row_step.origins), strict=True)
        texts.setdefault(row_step.row, []).extend(tokens)
    return texts


@pytest.mark.parametrize(
    ("name", "kind", "block"),
    [
        ("none", SnapshotRunner, False),
        ("none", StaticRunner, False),
        ("model", StaticRunner, True),
        ("model", SnapshotRunner, False),
        ("lookup", StaticRunner, True),
        ("lookup", SnapshotRunner, False),
        ("EAGLE-3", SnapshotRunner, False),
        ("DFlash", StaticRunner, False),
        ("Medusa", SnapshotRunner, False),
        ("MTP", StaticRunner, False),
    ],
)
def test_a_row_gets_what_it_gets_alone_whoever_ends(
    name: str, kind: type[SnapshotRunner] | type[StaticRunner], block: bool
) -> None:
    def loop() -> Loop:
        if name == "none":
            return Loop(Calls(kind(random_model("llama"))))
        warp = BatchWarp()
        target, drafter = DRAFTS[name](warp)
        runner = kind(target, hidden_layers=drafter.layers)
        rule = verify_block if block else verify
        return Loop(Calls(runner, drafter, K, verification=rule, redraw=block, warp=warp))

    asked = different_requests()
    alone = [collect(loop(), [request]) for request in asked]
    expected = {row: text for row, [text] in enumerate(map(dict.values, alone))}
    assert collect(loop(), asked) == expected
