"""The tools of a coding agent, called by the client of the protocol's own SDK."""

import asyncio
import os
import sys

import pytest

pytest.importorskip("mcp")
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client


@pytest.mark.processes
def test_an_agent_calls_the_command_line(tmp_path):
    (tmp_path / "log.txt").write_text(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )

    async def session():
        server = StdioServerParameters(
            command=sys.executable, args=["-m", "flatout", "mcp"], env={**os.environ}
        )
        async with Client(stdio_client(server)) as client:
            tools = {tool.name: tool.description for tool in (await client.list_tools()).tools}
            known = await client.call_tool("explain", {"log": "log.txt", "folder": str(tmp_path)})
            wrong = await client.call_tool("compare", {"old": "python a.py", "new": "python b.py"})
            return tools, known.structured_content, wrong.structured_content

    tools, known, wrong = asyncio.run(session())
    assert set(tools) == {"profile", "compare", "verify", "explain"}
    assert "learn the same" in tools["compare"]
    assert known["exit_code"] == 0
    assert "memory" in str(known["result"])
    assert wrong["exit_code"] == 127
    assert "a.py" in wrong["messages"]
