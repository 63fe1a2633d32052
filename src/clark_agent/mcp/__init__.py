"""MCP, both ways: the tools of MCP servers for an agent, and an agent as an MCP server."""
