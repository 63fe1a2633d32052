"""The packaged model: Gemma 3 with 270 million weights, for a first try without a key.

It is a base model: it continues text and has no chat template. `guide` leads it, and any other GGUF
file without a template, to calls and answers. It is licensed under the Gemma terms of use.
"""

from clark_agent.transports.local.packaged.case import Case, case_of
from clark_agent.transports.local.packaged.guidance import guide
from clark_agent.transports.local.packaged.weight_file import NAME, weights

__all__ = ["NAME", "Case", "case_of", "guide", "weights"]
