"""Models inside this process: any GGUF file, and a small packaged one for a first try.

`clark_agent.transports.local.model` is the transport and `clark_agent.transports.local.engine` runs
llama.cpp. `clark_agent.transports.local.packaged` guides a base model, such as the packaged one, to
calls and answers.
"""

from clark_agent.transports.local.model import LocalModel

__all__ = ["LocalModel"]
