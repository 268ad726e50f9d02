"""What somebody writes in ten minutes to see whether speculation pays: tokens per second of one server over another's.

    python benchmarks/naive_probe.py http://127.0.0.1:8001 http://127.0.0.1:8002    # regular, speculative

A yardstick for `harness latency`, see RESULTS.md; its mistakes are left in.
"""

import json
import sys
import time
import urllib.request

PROMPTS = [
    "Once upon a time there was a cheerful puppy named Rosa.",
    "One cold evening, a kind mouse named Paul went to the meadow.",
    "Theo was a clever hen who lived near the bridge.",
]


def tokens_per_second(url: str) -> float:
    num_tokens, started = 0, time.time()
    for prompt in PROMPTS:
        body = {"model": "any", "prompt": prompt, "max_tokens": 48, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), headers
        )
        answer = json.load(urllib.request.urlopen(request))
        num_tokens += answer["usage"]["completion_tokens"]
    return num_tokens / (time.time() - started)


print(f"{tokens_per_second(sys.argv[2]) / tokens_per_second(sys.argv[1]):.2f}")
