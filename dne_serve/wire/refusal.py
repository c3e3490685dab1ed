"""Write a problem document as the bytes of an HTTP answer, for clients that no application sees."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from dne_serve.http.problems import MEDIA_TYPE


def as_bytes(problem: dict[str, Any]) -> bytes:
    status = problem["status"]
    headers = {"Connection": "close", **({"Retry-After": "1"} if status == 503 else {})}
    answer = JSONResponse(problem, status, media_type=MEDIA_TYPE, headers=headers)
    lines = [name + b": " + value + b"\r\n" for name, value in answer.raw_headers]
    return b"".join([STATUS_LINE[status], *lines, b"\r\n", bytes(answer.body)])
