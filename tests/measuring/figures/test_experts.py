"""Experts of a mixture that a verification reads, counted by hand and through the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from harness.engines.arrivals import Arrival
from harness.engines.protocol import Answered, Arm, Question, Request, Traits
from harness.local.models.experts import num_experts, watching_experts
from harness.measuring.figures.experts import Experts, experts_read
from harness.measuring.rows import LatencyRow
from harness.results.files import read_rows
from in_process import Harness
from tiny_checkpoints import make_tokenizer
from wording import mentions


def mixture() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_()
    return model


def test_the_hook_sees_what_the_routers_chose() -> None:
    model = mixture()
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad(), watching_experts(model) as choices:
        outputs = model(tokens, output_router_logits=True)
    assert num_experts(model) == 8
    assert len(choices) == len(outputs.router_logits) == 2
    for chosen, logits in zip(choices, outputs.router_logits, strict=True):
        likeliest = logits.topk(2, -1).indices
        assert chosen.sort(-1).values.tolist() == likeliest.sort(-1).values.tolist()


def test_a_mixture_that_runs_all_its_experts_has_no_choices() -> None:
    config = AutoConfig.for_model(
        "llama4_text", vocab_size=50, hidden_size=32, intermediate_size=16, intermediate_size_mlp=32,
        num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16, num_local_experts=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad(), watching_experts(model) as choices:
        model(torch.arange(2, 14)[None])
    assert choices == []
    assert num_experts(model) is None


class Told(Arm):
    """An engine with one record, whose tokens take the experts of their own number and of the next."""

    traits = Traits(reports_drafts=True)
    num_experts = 50
    name = "speculative"
    gpus = ()

    def __init__(self) -> None:
        self.arms = [self]
        self.weights = self.reference = self

    def answer(
        self,
        requests: Sequence[Request],
        in_flight: int,
        extra: Sequence[Request] = (),
        watch: Any = None,
    ) -> Answered:
        watch([Arrival(0, 1.0, [5], []), Arrival(1, 1.0, [20], [])])
        # Of row 0, 5 6 9 are verified, and of row 1, 20 30.
        watch([Arrival(0, 2.0, [6, 7], [], [6, 9]), Arrival(1, 2.0, [21], [], [30])])
        watch([Arrival(0, 3.0, [8], [])])
        return Answered(requests=[], seconds=3.0)

    def synchronize(self) -> None:
        """Nothing runs on a device."""

    reset_peak_memory = peak_memory_bytes = synchronize

    def experts(self, token_ids: Sequence[int], num_last: int) -> list[list[list[int]]]:
        return [[[token, token + 1] for token in token_ids[-num_last:]]]


def test_the_rows_of_a_verification_read_experts_together() -> None:
    question: Any = Question([[1, 2], [3]], None, 0, [0, 1])  # type: ignore[arg-type]
    engine: Any = Told()
    # In a step {5, 6, 20, 21}; in the verification {5, 6, 7, 9, 10} and {20, 21, 30, 31}.
    assert experts_read(engine, question) == Experts(
        num_experts=50, experts_per_step=4.0, experts_per_verification=9.0
    )
    engine.num_experts = None
    assert experts_read(engine, question) is None


@pytest.mark.parametrize("batch_size", [1, 2])
def test_latency_tells_how_many_experts_a_verification_reads(
    harness: Harness, batch_size: int
) -> None:
    mixture().save_pretrained("mixture")
    make_tokenizer().save_pretrained("mixture")
    outcome = harness(
        "latency",
        "model=./mixture",
        "draft=./mixture",
        "num_prompts=2",
        f"batch_size={batch_size}",
        "decoding.max_new_tokens=10",
        "runner=eager",
        "prompts=english",
    )
    regular, speculative = read_rows("results/latency.csv", LatencyRow)
    assert regular.experts_per_verification is None
    assert speculative.num_experts == 8
    assert 2 <= speculative.experts_per_step <= 2 * batch_size
    assert speculative.experts_per_step < speculative.experts_per_verification <= 8
    assert mentions(outcome.summary, "verification reads", "of 8 experts in a layer")
