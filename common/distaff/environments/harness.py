"""The program that plays a v1 task, in this process: a chat loop with the task's MCP tools.

Invariant: every model call goes through the rollout's interception endpoint, so verifiers' trace, stops and limits see it; no
subprocess, no network but the loopback. verifiers finds it as a plugin: exactly one Harness in `__all__`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

from distaff.environments.failures import cancelled
from distaff.types import JSON, Message, Tool

__all__ = ["InProcessHarness"]


class InProcessHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Chat until the model calls no tool."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        **context: Any,
    ) -> ProgramResult:
        """One segment. exit_code 1 when the endpoint refuses a turn; verifiers then looks up why."""
        messages = self._opening(data)
        headers = {"Authorization": f"Bearer {secret}"}
        try:
            async with (
                aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as http,
                AsyncExitStack() as stack,
            ):
                toolbox = await Toolbox.open(stack, mcp_urls, timeout_s=self.config.tool_timeout)
                return await _converse(http, f"{endpoint}/chat/completions", messages, toolbox)
        except BaseExceptionGroup as group:  # anyio wraps what is raised inside an MCP session
            raise _first(group) from group

    def _opening(self, data: Any) -> list[Message]:
        system, prompt = self.resolve_prompt(data)
        opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            return [*opening, {"role": "user", "content": prompt}]
        return [*opening, *(message_to_wire(message) for message in prompt or [])]


async def _converse(http: aiohttp.ClientSession, url: str, messages: list[Message], toolbox: Toolbox) -> ProgramResult:
    while True:
        if cancelled():  # the environment swallowed it
            raise asyncio.CancelledError
        body: dict[str, JSON] = {"model": "policy", "messages": messages}
        if toolbox.tools:
            body["tools"] = toolbox.tools
        async with http.post(url, json=body) as response:
            if response.status != 200:
                return ProgramResult(exit_code=1, stdout="", stderr=await response.text())
            message = (await response.json())["choices"][0]["message"]
        messages.append(message)
        if not message.get("tool_calls"):
            return ProgramResult(exit_code=0, stdout="", stderr="")
        for call in message["tool_calls"]:
            messages.append(await toolbox.answer(call))


class Toolbox:
    """The tools of a task's MCP servers. Raises TimeoutError when a server takes longer than `timeout_s` for an answer."""

    def __init__(self, *, timeout_s: float) -> None:
        self.tools: list[Tool] = []
        self._timeout_s = timeout_s
        self._owners: dict[str, tuple[Any, str]] = {}

    @classmethod
    async def open(cls, stack: AsyncExitStack, urls: Mapping[str, str], *, timeout_s: float) -> Toolbox:
        """Connect to every server and list its tools. The sessions live as long as `stack`."""
        toolbox = cls(timeout_s=timeout_s)
        for server, url in urls.items():
            session = await _session(stack, url)
            await toolbox._in_time(session.initialize(), f"the tool server {server!r}")
            listed = await toolbox._in_time(session.list_tools(), f"the tool server {server!r}")
            for tool in listed.tools:
                toolbox._add(f"{server}_{tool.name}" if server else tool.name, session, tool)
        return toolbox

    def _add(self, name: str, session: Any, tool: Any) -> None:
        if name in self._owners:
            raise ValueError(f"two tools are called {name!r}; give one of the toolsets another TOOL_PREFIX")
        self._owners[name] = (session, tool.name)
        function = {"name": name, "description": tool.description or "", "parameters": _wire(tool)["inputSchema"]}
        self.tools.append({"type": "function", "function": function})

    async def answer(self, call: Mapping[str, Any]) -> Message:
        """The tool message for one call; what the model got wrong is told to the model."""
        name = call["function"]["name"]
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": await self._result(name, call)}

    async def _result(self, name: str, call: Mapping[str, Any]) -> JSON:
        if name not in self._owners:
            return f"error: there is no tool {name!r}; there are {', '.join(self._owners) or 'none'}"
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
        except ValueError as error:
            return f"error: the arguments are not JSON: {error}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object"
        session, tool = self._owners[name]
        return _content((await self._in_time(session.call_tool(tool, arguments), f"the tool {name!r}")).content)

    async def _in_time(self, answer: Awaitable[Any], who: str) -> Any:
        deadline = asyncio.timeout(self._timeout_s)
        try:
            async with deadline:
                return await answer
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(f"{who} did not answer within {self._timeout_s:g} s") from error


async def _session(stack: AsyncExitStack, url: str) -> Any:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    read, write, *_ = await stack.enter_async_context(streamable_http_client(url))
    return await stack.enter_async_context(ClientSession(read, write))


def _wire(thing: Any) -> dict[str, JSON]:
    """An object of mcp by the names of its protocol; those of its Python fields differ between mcp 1 and 2."""
    return dict(thing.model_dump(mode="json", by_alias=True))


def _content(blocks: list[Any]) -> JSON:
    parts = [_part(block) for block in blocks]
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def _part(block: Any) -> dict[str, JSON]:
    if block.type == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{_wire(block)['mimeType']};base64,{block.data}"}}
    return {"type": "text", "text": block.text if block.type == "text" else str(block)}


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
