"""A program between a client and an S3 server that behaves as stores do on a bad day.

    python flaky_proxy.py PORT SERVER_PORT FAILING SLOW SEED [HELD]

Of all requests the share FAILING is answered 500, 503, or not at all, half of them after the server did as it was told;
the share SLOW waits up to a second. With HELD, the first upload of a shard stays half done, and the file of that
name says so.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web
from yarl import URL

port, server_port = int(sys.argv[1]), int(sys.argv[2])
failing, slow = float(sys.argv[3]), float(sys.argv[4])
draw = random.Random(int(sys.argv[5]))
held = Path(sys.argv[6]) if len(sys.argv) > 6 else None
HOP = {"transfer-encoding", "connection", "keep-alive", "content-encoding"}


async def handle(request: web.Request) -> web.StreamResponse:
    if held is not None and not held.exists() and request.method == "PUT" and "/groups-" in request.path:
        await request.content.readany()
        held.touch()
        await asyncio.sleep(3600)  # its client is killed before
    body = await request.read()
    if draw.random() < slow:
        await asyncio.sleep(draw.random())
    fails, acts = draw.random() < failing, draw.random() < 0.5
    response: Any = None
    if not fails or acts:
        url = f"http://127.0.0.1:{server_port}{request.raw_path}"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        async with (
            ClientSession(auto_decompress=False) as session,
            session.request(request.method, URL(url, encoded=True), headers=headers, data=body) as answer,
        ):
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            response = web.Response(status=answer.status, headers=kept, body=await answer.read())
    if fails:
        kind = draw.choice(["500", "503", "cut"])
        if kind == "cut":
            assert request.transport is not None
            request.transport.close()
        return web.Response(status=503 if kind == "503" else 500, text=ERRORS[kind == "503"], content_type="text/xml")
    assert response is not None
    return response


ERRORS = {
    True: "<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    False: "<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>",
}

app = web.Application(client_max_size=2**30)
app.router.add_route("*", "/{tail:.*}", handle)
web.run_app(app, host="127.0.0.1", port=port, print=None, handler_cancellation=True)
