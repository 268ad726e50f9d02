"""`distill` through the command line, with random models of two layers."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import filelock
import pandas as pd
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from forked import start
from halting import HALTED, halting
from harness.commands.distill.loop import Course
from harness.commands.distill.measure import Distill
from harness.commands.distill.record import DistillSettings
from harness.commands.run import record_failure
from harness.config.errors import RunError
from harness.config.settings import ModelSettings, PromptSettings
from harness.drafting.heads.new_heads import save_head
from in_process import Harness, results
from known_heads import new_head, read_head
from processes import end
from some_settings import settings_of
from tiny_checkpoints import as_checkpoint, make_config, make_tokenizer
from wording import mentions

SHORT = (
    *(
        "distill",
        "model=./target",
        "prompts=prompts.jsonl",
        "num_prompts=2",
        "num_warmup=0",
        "num_resamples=100",
    ),
    *(
        "decoding.max_new_tokens=8",
        "decoding.ignore_eos=true",
        "decoding=greedy",
        "results.file=distill.csv",
    ),
    *(
        "answer_tokens=10",
        "temperatures=[0.0]",
        "texts_per_step=4",
        "save_every=2",
        "learning_rate=0.003",
    ),
)


@pytest.fixture
def models(tmp_path: Path) -> None:
    """`target`, the shallower `draft`, and ten prompts."""
    tokenizer = make_tokenizer()
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.2,
    }
    for seed, (name, layers) in enumerate({"target": 2, "draft": 1}.items()):
        torch.manual_seed(seed)
        config = make_config("llama", **sizes, num_hidden_layers=layers)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    prompts = [
        json.dumps({"prompt": f"{word} and"})
        for word in "one two three four five six seven eight nine ten".split()
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))


def rows(tmp_path: Path) -> pd.DataFrame:
    return pd.read_csv(tmp_path / "distill.csv").set_index(["stage", "arm"])


@pytest.mark.parametrize("seed", [None, 1])
def test_no_measured_prompt_is_learned(seed: int | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    asked = [{"prompt": f"{kind} {n}", "category": kind} for kind in "ab" for n in range(8)]
    file.write_text("\n".join(map(json.dumps, asked)))
    prompts = PromptSettings(name="mine", file=str(file), seed=seed)
    output = str(tmp_path / "out")
    distill = Distill(settings_of(DistillSettings, prompts=prompts, num_prompts=4, output=output))
    measured = {prompt.text for prompt in distill.stages["before"].prompts}
    assert len(measured) == 4
    assert len(distill.prompts) == 12
    assert measured.isdisjoint(prompt.text for prompt in distill.prompts)


@pytest.mark.usefixtures("models")
def test_draft_model_comes_closer_to_its_target(harness: Harness, tmp_path: Path) -> None:
    outcome = harness(*SHORT, "draft=./draft", "epochs=10")
    assert "Before and after training" in outcome.stdout
    assert "0 of 0" not in outcome.stdout
    found = rows(tmp_path)
    assert list(found.index) == [
        (stage, arm) for stage in ("before", "after") for arm in ("regular", "speculative")
    ]
    after = found.loc[("after", "speculative")]
    assert (after.num_texts, after.num_steps, after.output) == (8, 20, "drafts/target-draft")
    assert after.identical_prompts == 2
    harness(*SHORT, f"draft=./{after.output}", "output=twice", "epochs=10")
    # What was stored is what was measured.
    begun, further = (
        rows(tmp_path).loc[[(stage, "speculative")]].iloc[-1] for stage in ("before", "after")
    )
    assert begun.acceptance_histogram == after.acceptance_histogram
    assert further.loss < after.loss


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("kind", ["eagle3", "dflash", "dflash2", "medusa"])
def test_new_head_is_trained_stored_and_goes_on(
    kind: str, harness: Harness, tmp_path: Path
) -> None:
    harness(*SHORT, f"draft={kind}", "epochs=10")
    first = rows(tmp_path).loc[("after", "speculative")]
    assert first.draft_step_bytes > 0
    assert (
        f"{kind} head"
        in harness(*SHORT, f"draft=./{first.output}", "output=further", "epochs=10").stderr
    )
    before, after = (
        rows(tmp_path).loc[[(stage, "speculative")]].iloc[-1] for stage in ("before", "after")
    )
    assert before.acceptance_histogram == first.acceptance_histogram
    assert after.loss < first.loss


@pytest.mark.usefixtures("models")
def test_a_jetspec_head_is_trained_and_drafts_chains_and_trees(harness: Harness) -> None:
    harness(*SHORT, "draft=jetspec", "output=head", "epochs=10")
    raw = json.loads(Path("head/config.json").read_text())
    assert raw["dflash_config"]["causal_head"]
    few = ["num_prompts=2", "num_warmup=0", "num_resamples=100", "decoding.max_new_tokens=16"]
    how = ["draft.tree=chain,dynamic", "draft.budget=8", "decoding=greedy"]
    pair = ["model=./target", "draft=./head", "prompts=prompts.jsonl"]
    harness("latency", "-m", *pair, *few, *how, "decoding.ignore_eos=true")
    speculative = results().query("arm == 'speculative'")
    assert list(speculative.draft_tree) == ["chain", "dynamic"]
    assert list(speculative.identical_prompts) == [2, 2]
    chain, tree = speculative.mean_acceptance_length
    assert 1 < chain <= tree


@pytest.mark.usefixtures("models")
def test_parallel_draft_is_trained_with_masks_and_drafts_in_one_pass(
    harness: Harness, tmp_path: Path
) -> None:
    file = tmp_path / "draft" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pard_token": 3}))
    harness(*SHORT, "draft=./draft", "epochs=10")
    after = rows(tmp_path).loc[("after", "speculative")]
    assert after.identical_prompts == 2
    assert AutoConfig.from_pretrained(tmp_path / after.output).pard_token == 3
    pair = ("model=./target", f"draft=./{after.output}")
    latency = ("latency", *pair, "prompts=prompts.jsonl", "num_prompts=2")
    for refused in ("draft.tree=dynamic", "engine=huggingface"):
        complaint = harness(*latency, refused, code=2).complaint
        assert "drafts all tokens in one pass" in complaint


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_training_that_was_killed_goes_on_and_comes_to_the_same_weights(
    harness: Harness, tmp_path: Path
) -> None:
    arguments = [*SHORT, "draft=eagle3", "epochs=5"]
    harness(*arguments, "output=whole")

    training = tmp_path / "cut" / "training"
    # In the sixth step, after the state of the fourth was saved.
    halt = halting(f"{Course.__module__}.Course.rate", after=5)
    running = start(*arguments, "output=cut", cwd=tmp_path, until=HALTED, before=halt)
    end(running, signal.SIGKILL, -signal.SIGKILL)
    assert not (tmp_path / "cut" / "config.json").exists()
    assert len(torch.load(training / "state.pt")["losses"]) == 4

    assert (
        "output=cut: holds an unfinished training"
        in harness(*arguments, "output=cut", "epochs=3", code=2).stderr
    )
    harness(*arguments, "output=cut")
    assert not training.exists()
    assert (tmp_path / "cut" / "answers.jsonl").read_text() == (
        tmp_path / "whole" / "answers.jsonl"
    ).read_text()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "cut")]
    assert files[0] == files[1]


@pytest.mark.usefixtures("models")
def test_the_row_of_a_killed_job_leaves_its_training_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of a job that was killed when its draft was complete."""
    monkeypatch.chdir(tmp_path)
    prompts = PromptSettings(name="mine", file=str(tmp_path / "prompts.jsonl"))
    output = tmp_path / "out"
    settings = settings_of(
        DistillSettings, prompts=prompts, num_prompts=2, output=str(output), resume=False
    )
    state = output / "training" / "state.pt"
    state.parent.mkdir(parents=True)
    state.write_bytes(b"state")
    for complete in (False, True):
        if complete:
            (output / "config.json").touch()
        rows = record_failure("distill", settings, tmp_path / "run", RunError("killed"))
        assert [row.error for row in rows] == ["killed"] * 4
    assert state.read_bytes() == b"state"


@pytest.mark.usefixtures("models")
def test_answers_outlive_a_second_kill(harness: Harness, tmp_path: Path) -> None:
    """A training that goes on is killed before it has another answer."""
    arguments = [*SHORT, "draft=eagle3", "output=cut", "texts_per_step=1"]
    kept = []
    for number in (3, 0):
        halt = halting("harness.commands.distill.measure.generate", after=number)
        running = start(*arguments, cwd=tmp_path, until=HALTED, before=halt)
        end(running, signal.SIGKILL, -signal.SIGKILL)
        (tmp_path / HALTED).unlink()
        kept.append((tmp_path / "cut" / "training" / "answers.jsonl").read_text())
    assert len(kept[0].splitlines()) == 3
    assert kept[1] == kept[0]


@pytest.mark.usefixtures("models")
def test_an_unfinished_training_with_a_damaged_file_is_one_line(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise RunError("stopped")

    arguments = [*SHORT, "draft=eagle3", "epochs=1", "output=cut"]
    with monkeypatch.context() as patched:
        patched.setattr("harness.commands.distill.measure.Distill._save", stop)
        harness(*arguments, code=1)
    answers, state = (
        tmp_path / "cut" / "training" / name for name in ("answers.jsonl", "state.pt")
    )
    whole = answers.read_text()
    for text in (
        "{\n",
        "[]\n",
        "[[1], [2], [3], 4]\n",
        "[[1], [2], [3], [99999]]\n",
        "ä\n",
        whole * 2,
    ):
        answers.write_text(text, encoding="latin-1")
        assert mentions(
            harness(*arguments, code=2).complaint, "output=cut:", "answers.jsonl", "resume=false"
        )
    answers.write_text(whole)
    torch.save({"step": 1}, state)
    for _ in range(2):
        assert "whose state.pt is damaged: resume=false" in harness(*arguments, code=2).complaint
        state.write_bytes(b"PK damaged")
    harness(*arguments, "resume=false")


@pytest.mark.usefixtures("models")
def test_a_set_without_a_prompt_to_learn_is_refused_with_its_size(
    harness: Harness, tmp_path: Path
) -> None:
    (tmp_path / "few.txt").write_text("one\ntwo\nthree\n")
    complaint = harness.refused("distill", "draft=eagle3", "prompts=few.txt")
    assert mentions(complaint, "num_prompts=15", "3")


@pytest.mark.parametrize("output", ["mine", "mine/deeper"])
def test_an_output_that_is_a_file_is_one_line(
    harness: Harness, tmp_path: Path, output: str
) -> None:
    (tmp_path / "mine").write_text("text")
    complaint = harness.refused("distill", "draft=eagle3", f"output={output}")
    assert complaint == f"output={output}: must be a directory; mine is a file"


@pytest.mark.usefixtures("models")
def test_advice_names_the_setting_that_takes_the_memory(harness: Harness) -> None:
    outcome = harness(*SHORT, "draft=./draft", "texts_per_step=100000000", code=1)
    assert "what would fit: texts_per_step=" in outcome.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("models")
def test_each_job_of_a_sweep_trains_a_draft_of_its_own(harness: Harness, tmp_path: Path) -> None:
    """Those that differ in the draft alone have it in their names already; the same command again measures nothing."""
    arguments = (*SHORT, "draft=./draft", "epochs=1", "-m", "learning_rate=0.001,0.002")
    harness(*arguments)
    names = sorted(path.name for path in (tmp_path / "drafts").iterdir())
    assert names == [f"target-draft-learning_rate-{rate}" for rate in ("0.001", "0.002")]
    assert harness(*arguments).stderr.count("measured before") == 2


@pytest.mark.usefixtures("models")
def test_two_processes_do_not_train_in_the_same_directory(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "mine" / "training").mkdir(parents=True)
    arguments = (*SHORT, "draft=./draft", "output=mine", "epochs=1")
    with filelock.FileLock(tmp_path / "mine" / "training" / "lock"):
        complaint = harness(*arguments, code=2).complaint
    assert complaint == "output=mine: another process is training in it"
    harness(*arguments)
    assert not (tmp_path / "mine" / "training").exists()


@pytest.mark.usefixtures("models")
def test_report_reads_what_was_trained(harness: Harness) -> None:
    harness(*SHORT, "draft=./draft", "epochs=1")
    outcome = harness("report", "distill.csv", "output=report")
    assert "Before and after training" in outcome.stdout
    assert all(stage in outcome.stdout for stage in ("before", "after"))
    # A trained draft is no run of `latency`, and its prompts are others.
    assert "Speed-up\n" not in outcome.stdout


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    ("kind", "like", "further"),
    [("peagle", "eagle3", {"mask_token_id": 3}), ("dspark", "dflash", {"markov_rank": 8})],
)
def test_head_that_would_be_trained_wrong_is_refused(
    kind: str, like: str, further: dict[str, object], harness: Harness, tmp_path: Path
) -> None:
    target = as_checkpoint(AutoConfig.from_pretrained(tmp_path / "target"))
    new = new_head(like, target)
    raw = {**new.raw, "speculators_model_type": kind, **further}
    head = read_head(
        ModelSettings(name=kind, repository="new", architecture=raw), target, weights=False
    )
    assert head is not None
    module = head.build().to_empty(device="cpu")
    save_head(head, module, tmp_path / "head", torch.bfloat16)
    kinds = "EAGLE-3, DFlash, DFlash 2, JetSpec or Medusa"
    complaint = harness(*SHORT, "draft=./head", code=2).complaint
    assert complaint == f"draft=./head: must be an {kinds} head to be trained, not {kind}"


def test_finished_draft_is_not_overwritten(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    complaint = harness.refused("distill", "draft=eagle3", "output=mine")
    assert mentions(complaint, "output=mine", "latency draft=./mine")
