"""A server's command without its speculation, and what it says of model, draft and K: the flags of real programs."""

from __future__ import annotations

import shlex

import pytest

from harness.config.errors import SettingError
from harness.servers.command import ServerCommand, read_command
from harness.servers.dialects import DIALECTS

DIALECTS_HERE = list(DIALECTS.all().values())


def read(command: str, **values: object) -> ServerCommand:
    return read_command(shlex.split(command), values, DIALECTS_HERE)


def flags_of(command: ServerCommand) -> str:
    """The command without the flags that every server of its kind gets."""
    added = [*command.startup.listening, *command.startup.for_all]
    return shlex.join(word for word in command.words if word not in added)


@pytest.mark.parametrize(
    ("typed", "regular"),
    [
        ("llama-server -m X -ngl 9 --spec-type draft-mtp --spec-draft-n-max 2", "llama-server -m X -ngl 9"),
        ("/opt/llama-server-cuda -m X -md Y --spec_type draft-simple -cd 9 -t 4", "/opt/llama-server-cuda -m X -t 4"),
        ("llama-server -m X -md Y -draft '--model Z -ot exps=CPU' --draft 4 -t 4", "llama-server -m X -t 4"),
        ("vllm serve A --speculative-config '{\"method\": \"ngram\"}' --dtype half", "vllm serve A --dtype half"),
        ("vllm serve A --speculative_config={} -sc.method x --speculative-config.model=y", "vllm serve A"),
        (
            "python -m vllm.entrypoints.openai.api_server --model A --spec-method ngram",
            "python -m vllm.entrypoints.openai.api_server --model A",
        ),
        ("numactl -N 0 env A=b vllm serve A -sc {}", "numactl -N 0 env A=b vllm serve A"),
        (
            "docker run --rm -p {port}:8000 vllm/vllm-openai:v1 --model A -sc {}",
            "docker run --rm -p {port}:8000 vllm/vllm-openai:v1 --model A",
        ),
        (
            "sglang serve --model-path A --speculative-algorithm EAGLE3 --speculative-adaptive --tp 2",
            "sglang serve --model-path A --tp 2 --max-running-requests 48",
        ),
        (
            "sglang serve --model-path A --max-running-requests 8 --speculative-algorithm NEXTN",
            "sglang serve --model-path A --max-running-requests 8",
        ),
        ("mlx_lm.server --model a --draft-model b --num-draft-tokens 4", "mlx_lm.server --model a"),
    ],
)  # fmt: skip
def test_the_regular_command_is_the_same_without_speculation(typed: str, regular: str) -> None:
    assert flags_of(read(typed).prepared().regular()).replace("'", "") == regular


def test_ports_are_ours_unless_the_user_places_them() -> None:
    command = read("llama-server -m X --port 8080 --host 0.0.0.0 --metrics").prepared()
    assert shlex.join(command.words).replace("'", "") == (
        "llama-server -m X --metrics --host 127.0.0.1 --port {port}"
    )
    placed = read("sudo podman run -p {port}:8080 ghcr.io/x/llama.cpp:server -m X").prepared()
    assert "--port" not in placed.words
    with pytest.raises(SettingError, match=r"docker run --rm -p \{port\}:8000"):
        read("docker run vllm/vllm-openai --model A").prepared()
    with pytest.raises(SettingError, match=r"write \{port\} where its port goes"):
        read("./serve.sh").prepared()
    assert read("./serve.sh {port}").prepared().words == ("./serve.sh", "{port}")


@pytest.mark.parametrize(
    ("typed", "model", "draft", "method", "k"),
    [
        ("llama-server -m ./a/Q.gguf --spec-type draft-mtp", "./a/Q.gguf", "draft-mtp", "draft-mtp", 3),
        ("llama-server -hf o/r:Q4 -hfd o/d --spec-type draft-eagle3 --spec-draft-n-max 7", "o/r:Q4", "o/d",
            "draft-eagle3", 7),
        ("llama-server -m X -a ' ,' --spec-type ngram-mod", "X", "ngram-mod", "ngram-mod", 64),
        ("llama-server -m X --spec-type ngram-mod,draft-mtp", "X", "ngram-mod,draft-mtp", "ngram-mod,draft-mtp", None),
        ("vllm serve A --speculative-config "
            """'{"method": "eagle3", "model": "o/h", "num_speculative_tokens": {K}}'""", "A", "o/h", "eagle3", 5),
        ("vllm serve --model A --served-model-name B -sc.num_speculative_tokens 2 -sc.method=mtp",
            "B", "mtp", "mtp", 2),
        ("vllm serve A --spec-method ngram --spec-tokens 6", "A", "ngram", "ngram", 6),
        ("sglang serve --model A --speculative-algorithm EAGLE3 --speculative-draft-model o/h"
            " --speculative-num-steps 3", "A", "o/h", "EAGLE3", 3),
        ("sglang serve --model A --speculative-algorithm DFLASH --speculative-num-draft-tokens 8",
            "A", "DFLASH", "DFLASH", 7),
        ("sglang serve --model A --speculative-algorithm DFLASH --speculative-dflash-block-size 16",
            "A", "DFLASH", "DFLASH", 15),
        ("sglang serve --model A --speculative-algorithm DSPARK --speculative-draft-model o/h --speculative-num-steps 1"
            " --speculative-eagle-topk 1 --speculative-dspark-block-size 8", "A", "o/h", "DSPARK", 8),
        # Aliases are one flag, which counts where it was typed last.
        ("sglang serve --model A --speculative-algorithm NGRAM --speculative-draft-model-path o/h"
            " --speculative-draft-model o/i", "A", "o/i", "NGRAM", None),
        ("llama-server -m X --model Y --spec-type draft-mtp --draft-max 2 --spec-draft-n-max 4 --draft-n 6",
            "Y", "draft-mtp", "draft-mtp", 6),
        ("llama serve -hf M:Q4_K_M --spec-type draft-dflash", "M:Q4_K_M", "draft-dflash", "draft-dflash", 3),
        # ik_llama.cpp: each flag is a stage, with its settings; of two no K is known.
        ("llama-server -m a -md d --spec-type draft:n_max=16,p_min=0.5", "a", "d", "draft", 16),
        ("llama-server -m a --spec-type ngram-mod:n_max=64,n_min=2 --spec-type mtp:n_max=1",
            "a", "ngram-mod,mtp", "ngram-mod,mtp", None),
        # llama.cpp adds up what its flags name: `none` takes nothing back.
        ("llama-server -m a -md d --spec-type draft-simple --spec-type none", "a", "d", "draft-simple", 3),
        ("llama-server -m a -md d --spec-type ngram-mod --spec-type draft-mtp", "a", "d", "ngram-mod,draft-mtp", None),
        # A draft alone, whose file is not here.
        ("llama-server -m a -md b.gguf --spec-draft-n-max 4", "a", "b.gguf", None, 4),
        ("llama-server -m a -hfd u/r", "a", "u/r", None, None),
        ("vllm serve A --served-model-name 'Qwen 3.6 27B' -sc.method=mtp", "Qwen 3.6 27B", "mtp", "mtp", None),
        # No word of a mount is the image.
        ("docker run -p {port}:8000 -v cache:/vllm/vllm_cache vllm/vllm-openai --model M -sc.method=mtp",
            "M", "mtp", "mtp", None),
        # Abbreviations that only one flag begins with; K by load.
        ("sglang serve --model A --speculative-algo EAGLE --speculative-num-s 3", "A", "EAGLE", "EAGLE", 3),
        ("vllm serve A --spec-met ngram --spec-tok 4", "A", "ngram", "ngram", 4),
        ('vllm serve A -sc.method=mtp --speculative-config.num_speculative_tokens_per_batch_size [[1,5],[8,2]]',
            "A", "mtp", "mtp", None),
        ("llama-server -m a.gguf --spec-type mtp:n_max=3,p_min=0.0", "a.gguf", "mtp", "mtp", 3),
        # Where no K is typed it is the program's default.
        ("mlx_lm.server --model a --draft-model b", "a", "b", None, 3),
        ("mlx_lm.server --model a --draft-model b --num-draft 5", "a", "b", None, 5),
        ("llama-server -m X --spec-type ngram-simple", "X", "ngram-simple", "ngram-simple", 48),
        ("llama-server -m X --spec-type ngram-map-k4v", "X", "ngram-map-k4v", "ngram-map-k4v", 48),
    ],
)  # fmt: skip
def test_a_command_says_what_it_runs(
    typed: str, model: str, draft: str | None, method: str | None, k: int | None
) -> None:
    command = read(typed, K=5)
    assert (command.model, command.draft, command.method) == (model, draft, method)
    assert command.num_draft_tokens == k
    assert command.drafts


@pytest.mark.parametrize(
    ("typed", "rule", "is_lossy"),
    [
        ("sglang serve --model A --speculative-algorithm EAGLE --speculative-accept-threshold-single 0.5",
            "--speculative-accept-threshold-single 0.5", True),
        ("sglang serve --model A --speculative-algorithm EAGLE --speculative-accept-threshold-acc=1.0", None, False),
        ("SGLANG_SIMULATE_ACC_LEN=3 sglang serve --model A --speculative-algorithm NGRAM",
            "SGLANG_SIMULATE_ACC_LEN", True),
        ("vllm serve A -sc.method=ngram -sc.rejection_sample_method=synthetic",
            "--speculative-config.rejection_sample_method synthetic", True),
        ("vllm serve A -sc.method=dspark -sc.rejection_sample_method=block", None, False),
        ("vllm serve A -sc.method=dspark -sc.rejection_sample_method=traversal",
            "--speculative-config.rejection_sample_method traversal", False),
        ("sglang serve --model A --speculative-algorithm EAGLE --speculative-use-block-verification", None, False),
        ("llama-server -m X --spec-type draft-mtp --spec-synth-len 3", "--spec-synth-len 3", True),
        ("vllm serve A -sc.method=ngram", None, False),
        ("llama-server -m X --spec-type draft-mtp", None, False),
    ],
)  # fmt: skip
def test_a_command_says_what_it_accepts_by(typed: str, rule: str | None, is_lossy: bool) -> None:
    """A value that nobody knows is a rule, and not lossy."""
    command = read(typed)
    assert (command.rule, command.is_lossy) == (rule, is_lossy)
    # The regular server has none of it.
    assert command.regular().rule is None


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("vllm serve A", "nothing in it makes vLLM speculate: add --speculative-config"),
        ("llama-server -m X -md Y --spec-type draft-simple,none", "nothing in it makes llama.cpp speculate"),
        ("llama-server -m X -md Y --spec-type none", "nothing in it makes llama.cpp speculate: add --spec-type"),
        ("llama-server -m X --spec-tipe draft-mtp", "--spec-tipe is not known here (did you mean --spec-type?)"),
        ("sglang serve --model A --speculative-draft-mod X", "(did you mean --speculative-draft-model?)"),
        ("llama-server -m X --spec-type", "--spec-type needs a value behind it"),
        ("llama-server --spec-type ngram-mod --spec-new 3", "--spec-new is not known here"),
        ("vllm serve A -sc {method:ngram}", "behind --: -sc must be JSON"),
        ("vllm serve A --spec-tokens {k}", "{k} has no value: vary.k=VALUE sets one"),
        ("llama-server --fim-qwen-14b-spec --spec-default", "a preset that speculates"),
        ("HF_TOKEN=secret vllm serve A -sc {}", "HF_TOKEN: what is typed is written into files"),
        ("vllm serve A --api-key secret -sc {}", "--api-key: what is typed is written into files"),
        ("sh -c 'exec llama-server --port {port} --alias a#b --api-key X'", "--api-key: what is typed"),
        ("bash -c '(sh -c \"HF_TOKEN=x vllm serve --port {port}\")'", "HF_TOKEN: what is typed"),
        ("llama-server -mu https://user:word@hf.co/x -md Y --spec-type draft-simple", "a key or password: what"),
        *(
            (f"docker run {typed} -p {{port}}:8000 vllm/vllm-openai --model A -sc {{}}", "HF_TOKEN: what is typed")
            for typed in ("-e HF_TOKEN=x", "--env=HF_TOKEN=x", "-eHF_TOKEN=x")
        ),
        ("docker run -d -p {port}:80 vllm/vllm-openai --model A -sc {}", "-d: detaches: leave it out"),
        ("docker run --cidfile=f -p {port}:80 vllm/vllm-openai --model A -sc {}", "--cidfile: names the file by which"),
        ("docker run --name=v -p {port}:80 vllm/vllm-openai --model A -sc {}", "--name: cannot be both arms'"),
        ("vllm serve A --uds /s -sc {}", "--uds: it would listen on no port"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(typed: str, said: str) -> None:
    with pytest.raises(SettingError) as refused:
        read(typed).prepared().regular()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_variables_that_speculate_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "draft-mtp")
    regular = read("env LLAMA_ARG_SPEC_DRAFT_N_MAX=2 A=1 llama-server -m X").prepared().regular()
    assert regular.words[:6] == ("env", "-u", "LLAMA_ARG_SPEC_TYPE", "env", "A=1", "llama-server")
    # One that is typed and inherited would be inherited where it is no longer typed.
    speculative = read("LLAMA_ARG_SPEC_DRAFT_N_MAX=8 llama-server -m X --spec-type draft-mtp")
    assert speculative.num_draft_tokens is None, "a variable may set it"
    regular = read("LLAMA_ARG_SPEC_TYPE=ngram-simple llama-server -m X").prepared().regular()
    assert regular.words[:5] == ("env", "-u", "LLAMA_ARG_SPEC_TYPE", "env", "llama-server")


@pytest.mark.parametrize("variable", ["-e {}", "--env {}", "--env={}"])
def test_variables_of_a_container_go_with_their_flags(variable: str) -> None:
    start = "docker run -e A=1 {} -p {{port}}:8080 ghcr.io/ggml-org/llama.cpp:server -m X"
    speculates = variable.format("LLAMA_ARG_SPEC_TYPE=draft-mtp")
    regular = read(start.format(speculates)).prepared().regular()
    expected = read(start.format("")).prepared()
    assert regular.words == expected.words


@pytest.mark.parametrize(
    ("command", "title"),
    [
        ("A=0 /home/me/vllm/vllm-env/bin/llama-server -m x.gguf", "llama.cpp"),
        ("./serve.sh /models/vllm/vllm-test {port}", ""),
        ("docker run -v /srv/vllm/vllm-a:/m me/server {port}", ""),
        ("sudo docker run -p {port}:80 vllm/vllm-openai --model A", "vLLM"),
    ],
)
def test_only_a_containers_image_is_a_program(command: str, title: str) -> None:
    assert read(command).dialect.title == title


def test_two_servers_on_a_cpu_bind_no_threads_to_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = read("A=1 vllm serve B --spec-tokens 3").without_core_binding()
    variable = "VLLM_CPU_OMP_THREADS_BIND=nobind"
    assert shlex.join(beside.words) == f"env {variable} env A=1 vllm serve B --spec-tokens 3"
    assert beside.drafts
    assert beside.without_core_binding() == beside
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    for words in ("vllm serve B", "llama-server -m B", "./serve.sh"):
        assert read(words).without_core_binding() == read(words)


def test_a_method_of_none_drafts_nothing_whatever_else_is_set() -> None:
    command = read("llama-server -m X --spec-type none --draft-max 8")
    assert not command.drafts
    assert command.num_draft_tokens is None
