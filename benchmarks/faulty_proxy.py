"""A server with a planted fault, by a proxy before an honest one: what no server without sources would let us plant.

    FAULT_FILE=fault.txt python benchmarks/faulty_proxy.py http://127.0.0.1:18722 18723

forwards what comes at port 18723, and changes completions as the fault says whose name is in the file: read for each
request, so that one proxy serves for all. `recovery_served.py --url` asks it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

Body = dict[str, Any]


def colder(body: Body) -> Body:
    """Drawn at another temperature, as by a residual that is warped twice."""
    return body | {"temperature": body["temperature"] / 2}


def drawn_greedily(body: Body) -> Body:
    """Whatever the temperature, as where drafts are verified by the likeliest token."""
    return body | {"temperature": 0}


def penalty_left_on(body: Body) -> Body:
    """A penalty of the server's own that was not asked for."""
    return body | {"repeat_penalty": 1.1}


def truncation_left_on(body: Body) -> Body:
    """A truncation of the server's own that was not asked for."""
    return body | {"min_p": 0.1}


def stale_prefix(body: Body) -> Body:
    """The answer to a prompt that begins with another token, as from another request's cache."""
    return body | {"prompt": [20, *body["prompt"][1:]]}


FAULTS: dict[str, Callable[[Body], Body]] = {
    fault.__name__: fault
    for fault in (colder, drawn_greedily, penalty_left_on, truncation_left_on, stale_prefix)
}

app = FastAPI()
fault_file = Path(os.environ["FAULT_FILE"])
# A new connection for each request: one that is kept alive may be closed as it is used.
limits = httpx2.Limits(max_keepalive_connections=0)
client = httpx2.AsyncClient(base_url=sys.argv[1], timeout=None, limits=limits)


@app.api_route("/{path:path}", methods=["GET", "POST"])
async def forward(path: str, request: Request) -> StreamingResponse:
    content = await request.body()
    fault = fault_file.read_text().strip()
    if request.method == "POST" and path.endswith("completions") and fault != "none":
        content = json.dumps(FAULTS[fault](json.loads(content))).encode()
    headers = {"content-type": "application/json"}
    message = client.build_request(request.method, path, content=content, headers=headers)
    answer = await client.send(message, stream=True)
    return StreamingResponse(
        answer.aiter_bytes(), answer.status_code, media_type=answer.headers.get("content-type")
    )


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[2]), log_level="warning")
