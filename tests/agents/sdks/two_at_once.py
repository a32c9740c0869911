"""Two episodes at once of one OpenAI Agents SDK: each asks its own address, as docs/agents.md says."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from agents import Agent, OpenAIProvider, RunConfig, Runner, set_tracing_disabled


class Policy(BaseHTTPRequestHandler):
    """Answers every request with the key that it was sent."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        said = f"{self.server.server_port} {self.headers['Authorization']}"
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
        body = json.dumps(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


async def answer(base_url: str, api_key: str) -> str:
    provider = OpenAIProvider(base_url=base_url, api_key=api_key, use_responses=False)
    agent = Agent(name="searcher", instructions="Answer.", model="policy")
    return (await Runner.run(agent, "?", run_config=RunConfig(model_provider=provider))).final_output


async def main() -> None:
    set_tracing_disabled(True)
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Policy) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    addresses = [f"http://127.0.0.1:{server.server_port}/v1" for server in servers]
    found = await asyncio.gather(*(answer(url, f"key-{number}") for number, url in enumerate(addresses)))
    assert found == [f"{server.server_port} Bearer key-{number}" for number, server in enumerate(servers)], found
    print("each its own")


asyncio.run(main())
