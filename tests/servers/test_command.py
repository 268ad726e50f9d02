"""A server's command without its speculation, and the names in it: the flags of real programs."""

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
        ("llama-server -m X -mtp -mtprot q8_0 -c 9", "llama-server -m X -c 9"),
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
    typed = ("./serve.sh", "{port}", "{{K}}", "${K}")
    assert read(" ".join(typed), K=5).prepared().words == typed


@pytest.mark.parametrize(
    ("typed", "model", "draft"),
    [
        ("llama-server -m ./a/Q.gguf --spec-type draft-mtp", "./a/Q.gguf", "draft-mtp"),
        ("llama-server -hf o/r:Q4 -hfd o/d --spec-type draft-eagle3 --spec-draft-n-max 7", "o/r:Q4", "o/d"),
        ("llama-server -m X -a ' ,' --spec-type ngram-mod,draft-mtp", "X", "ngram-mod,draft-mtp"),
        ("vllm serve A --speculative-config "
            """'{"method": "eagle3", "model": "o/h", "num_speculative_tokens": {K}}'""", "A", "o/h"),
        ("vllm serve --model A --served-model-name B -sc.num_speculative_tokens 2 -sc.method=mtp", "B", "mtp"),
        ("vllm serve A --spec-method ngram --spec-tokens 6", "A", "ngram"),
        ("llama-server -m X -md Y --spec-type ngram-simple", "X", "ngram-simple"),
        # Aliases are one flag, which counts where it was typed last.
        ("sglang serve --model A --speculative-algorithm NGRAM --speculative-draft-model-path o/h"
            " --speculative-draft-model o/i", "A", "o/i"),
        ("llama-server -m X --model Y --spec-type draft-mtp", "Y", "draft-mtp"),
        # A draft alone, and ik_llama.cpp's stage with its settings.
        ("llama-server -m a -md b.gguf --spec-draft-n-max 4", "a", "b.gguf"),
        ("llama-server -m a.gguf --spec-type mtp:n_max=3,p_min=0.0", "a.gguf", "mtp:n_max=3,p_min=0.0"),
        ("vllm serve A --served-model-name 'Qwen 3.6' -sc.method=x --spec-method=y -sc.method=mtp", "Qwen 3.6", "mtp"),
        # No word of a mount is the image.
        ("docker run -p {port}:8000 -v cache:/vllm/vllm_cache vllm/vllm-openai --model M -sc.method=mtp", "M", "mtp"),
        ("mlx_lm.server --model a --draft-model b", "a", "b"),
    ],
)  # fmt: skip
def test_a_command_names_what_it_runs(typed: str, model: str, draft: str) -> None:
    command = read(typed, K=5)
    assert (command.model, command.draft) == (model, draft)
    assert command.drafts


@pytest.mark.parametrize(
    ("typed", "has_pool"),
    [
        ("llama-server -m X --spec-type draft-mtp,ngram-mod", True),
        ("llama-server -m X --spec-type ngram-simple", False),
        ("vllm serve A -sc.method=suffix", True),
        ("sglang serve --model A --speculative-algorithm NGRAM", True),
        ("vllm serve A", False),
    ],
)
def test_methods_that_learn_from_all_requests(typed: str, has_pool: bool) -> None:
    assert read(typed).has_pool == has_pool


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("vllm serve A", "no flag of it makes vLLM speculate: add --speculative-config"),
        ("llama-server -m X -md Y --spec-type draft-simple,none", "no flag of it makes llama.cpp speculate"),
        ("llama-server -m X --spec-type none --draft-max 8", "makes llama.cpp speculate: add --spec-type"),
        ("srun -N1 docker run vllm/vllm-openai --model A", "docker run --rm -p {port}:8000"),
        ("docker exec v vllm serve A -sc {} --port {port}", "its server runs on when the harness ends it: start both"),
        ("A=1 ssh gpu1 ./serve.sh {port}", "its server runs on when the harness ends it: start both"),
        ("bash ./set.sh llama-server -m X -c 4096", "no flag of it makes llama.cpp speculate"),
        ("bash -lc 'vllm serve A -sc {}'", "a shell starts the server: type the server's own words"),
        ("docker run --entrypoint=/bin/bash -p {port}:80 vllm/vllm-openai -c 'vllm serve A'", "a shell starts"),
        ("vllm serve A -sc {} --nnodes 2", "--nnodes: starts more than one server, or a part of one: start both"),
        ("vllm serve A --kv_transfer_config.kv_role=kv_producer -sc {}", "--kv-transfer-config: starts more than one"),
        ("vllm serve A --spec-tokens {K+1}", "{K+1} is no name: vary.NAME=VALUE fills in {NAME}"),
        ("./serve.sh", "write {port} where its port goes"),
        ("llama-server -m X --spec-tipe draft-mtp", "--spec-tipe is not known here (did you mean --spec-type?)"),
        ("sglang serve --model A --speculative-draft-mod X", "(did you mean --speculative-draft-model?)"),
        ("llama-server -m X --spec-type", "--spec-type needs a value behind it"),
        ("llama-server --spec-type ngram-mod --spec-new 3", "--spec-new is not known here"),
        ("vllm serve A -sc {method:ngram}", "after --: -sc must be JSON"),
        ("""vllm serve A -sc '{"k": {k}}'""", "{k} has no value: vary.k=VALUE sets one"),
        ("llama-server --fim-qwen-14b-spec --spec-default", "a preset that names its port"),
        ("HF_TOKEN=secret vllm serve A -sc {}", "HF_TOKEN: what is typed is written into files"),
        ("sudo -E docker run -itd -p {port}:80 vllm/vllm-openai --model A -sc {}", "-itd: detaches: leave it out"),
        ("docker run --cidfile=f -p {port}:80 vllm/vllm-openai --model A -sc {}", "--cidfile: names the file by which"),
        ("docker run --name=v -p {port}:80 vllm/vllm-openai --model A -sc {}", "--name: would name two containers"),
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
    regular = read("LLAMA_ARG_SPEC_TYPE=ngram-simple llama-server -m X").prepared().regular()
    assert regular.words[:5] == ("env", "-u", "LLAMA_ARG_SPEC_TYPE", "env", "llama-server")
    assert not regular.drafts


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
        ("./serve.sh vllm/vllm-openai {port}", ""),
        ("docker run -v /srv/vllm/vllm-a:/m me/server {port}", ""),
        ("sudo docker run -p {port}:80 vllm/vllm-openai --model A", "vLLM"),
    ],
)
def test_only_a_containers_image_is_a_program(command: str, title: str) -> None:
    assert read(command).dialect.title == title


@pytest.mark.parametrize(
    ("command", "program"),
    [
        ("env -u LLAMA_ARG_SPEC -u B A=1 ./bin/llama-server -m x", "./bin/llama-server"),
        ("A=1 env B=2 ./serve.sh {port}", "./serve.sh"),
        ("env --chdir=/ ./serve.sh {port}", "env"),
        ("env -u A", "env"),
    ],
)
def test_a_program_is_behind_env_and_what_it_sets(command: str, program: str) -> None:
    assert ServerCommand(tuple(shlex.split(command)), DIALECTS["vllm"], 0).program == program


def test_two_servers_on_a_cpu_bind_no_threads_to_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = read("A=1 vllm serve B --spec-tokens 3").without_core_binding()
    variable = "VLLM_CPU_OMP_THREADS_BIND=nobind"
    assert shlex.join(beside.words) == f"env {variable} env A=1 vllm serve B --spec-tokens 3"
    assert beside.drafts
    assert beside.without_core_binding() == beside
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    for words in ("vllm serve B", "llama-server -m B", "./serve.sh"):
        assert read(words).without_core_binding() == read(words)
