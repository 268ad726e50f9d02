"""Keys in what is typed: refused in every spelling, before a file is written, and honest words are not."""

import json
import shlex
from pathlib import Path

import pytest

from harness.config.command_line import check_has_no_key, check_settings_have_no_key
from in_process import Harness

KEY = "q7Zp2Lw9Xc4Vb1Nm6Rt8Ky"
SPELLINGS = Path(__file__).with_name("secret_spellings.txt").read_text().splitlines()[2:]
HONEST = [
    "vllm serve A --stream-output-token-by-token",
    "vllm serve A --stream-output-token-by-token --port 1",
    "vllm serve --enable-prompt-tokens-details A --allow-credentials --no-auth x",
    "vllm serve A --num-speculative-tokens 3 --max-num-batched-tokens 8192 --long-prefill-token-threshold 4096",
    "vllm serve A --tokenizer B --tokenizer-mode auto --kv-cache-dtype fp8 --return-tokens-as-token-ids",
    "vllm serve A --hf-token --ssl-keyfile /run/key.pem --api-prefix /x",
    "vllm serve A --speculative-config '{\"method\":\"mtp\",\"num_speculative_tokens\":3}'",
    "vllm serve A --override-generation-config '{\"eos_token_id\": 2, \"bos_token\": \"<s>\"}'",
    "sglang serve A --speculative-token-map thunlp/x.pt --schedule-policy routing-key --auth-type none",
    "sglang serve A --prefill-delayer-token-usage-low-watermark 0.2 --eos-token 151645 --pass 3",
    "llama-server -m a.gguf --api-key-file keys.txt --ssl-key-file k.pem --keep 4 -ctk q8_0 --perf",
    "llama-server -m a.gguf --override-kv tokenizer.ggml.add_bos_token=bool:false,add_eos_token=bool:true",
    "docker run -e HF_TOKEN --env-file .env -v /run/secrets/api_key:/run/key:ro -u 1000:1000 -p {port}:80 image",
    "env TOKENIZERS_PARALLELISM=false GOOGLE_APPLICATION_CREDENTIALS=/keys/x.json HF_TOKEN= CUDA_VISIBLE_DEVICES=0 a",
    "timeout -k 5s 1h a --spec-model hf_quantized/monkey --top-k 5 -k 40",
    f"server --key-file {KEY} --request-id {KEY} -m /models/{KEY}/a.gguf",
    "server --max-tokens 64 --spec-tokens {K} --key-file /run/key",
    "python -u server.py --hf-overrides '{\"architectures\": [\"Eagle3LlamaForCausalLMEagle3\"]}' -u app:app",
    "sh -c 'server --api-key $MYK --token ${TOKEN} --password $(cat key) -H \"Authorization: Bearer $MYK\" {port}'",
    "vllm serve A --revision e3a795c5e9a82ee40611c416b8a7786c73198991 --ssl-certfile cert.pem --pem cert.pem",
    "docker run vllm:v0.10@sha256:e3a795c5e9a82ee40611c416b8a7786c73198991e3a795c5e9a82ee40611c416 --gpus all",
    "server --url https://k8z5x9q2w1e4r7t0.us-east-1.aws.endpoints.huggingface.cloud/v1 --run 20261127T093115123456Z",
]  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_key_leaves_no_trace(
    spelling: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, _, words = spelling.replace("<KEY>", KEY).partition(": ")
    typed = json.loads(words)
    if kind.startswith("known"):
        monkeypatch.setenv("MYK", KEY)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEY)
    is_server_named = any(name in words for name in ("url=", "model=", "https://me"))
    server = [] if is_server_named else ["url=http://127.0.0.1:9/v1"]
    for sweep in ([], ["-m", "seed=1,2"]):
        if kind.endswith("command"):
            command = ["server", "--port", "{port}", *typed]
            refused = harness.refused("latency", *sweep, "--", *command)
            assert refused.startswith("the command after --: ")
            assert not list(tmp_path.rglob("*"))
        else:
            # A sweep has no use for the directory of a single run.
            is_unused = bool(sweep) and "hydra.run.dir" in words
            code = None if is_unused else 2
            harness("latency", *sweep, "n=2", *server, *typed, code=code)
        assert KEY not in harness.last.stdout + harness.last.stderr
        for file in tmp_path.rglob("*"):
            assert KEY not in str(file)
            assert file.is_dir() or KEY.encode() not in file.read_bytes(), file


@pytest.mark.parametrize(
    "text", ["The bearer of news said: password: hunter, token: 5", "Explain api_key: what is it?"]
)
def test_a_prompt_may_speak_of_keys(text: str) -> None:
    for name in ("prompt", "prompts.system", "prompts.template"):
        check_settings_have_no_key([f"{name}={text}"])


@pytest.mark.parametrize("typed", HONEST)
def test_an_honest_command_is_taken(typed: str) -> None:
    check_has_no_key(shlex.split(typed))


def test_a_directory_of_the_environment_is_no_key(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.cwd()
    monkeypatch.setenv("PWD", str(here))
    monkeypatch.setenv("SSH_AUTH_SOCK", str(here / "agent"))
    harness("latency", "engine=simulated", "num_prompts=2", f"results.file={here}/agent.csv")
