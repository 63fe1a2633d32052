"""A gateway: a server of your own between clients and model providers.

`gateway` creates the application and `serve_gateway` serves it. The client is a transport,
`clark_agent.transports.ProxyStream`.
"""

from clark_agent.gateway.app import SAFE_EXTRAS, gateway
from clark_agent.gateway.server import serve_gateway

__all__ = ["SAFE_EXTRAS", "gateway", "serve_gateway"]
