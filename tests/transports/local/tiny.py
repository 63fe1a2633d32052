"""A model of a few kilobytes: loaded at once, and read and continued in no time.

Its tokens are bytes, its one layer does nothing, and it repeats a piece of what it was given. It is
for what happens around a model: a window that is full, memory that is freed, a process that ends.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import prod

__all__ = ["tiny_model"]

_WIDTH = 32
_TOKENS = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]]
_UNKNOWN, _CONTROL, _BYTE = 2, 3, 6  # kinds of tokens
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY = 4, 5, 6, 8, 9  # types of values
_ALIGNMENT = 32


def tiny_model() -> bytes:
    """The file, as https://github.com/ggml-org/ggml/blob/master/docs/gguf.md describes it."""
    metadata = [
        _pair("general.architecture", _STRING, _string("llama")),
        _pair("llama.context_length", _UINT32, struct.pack("<I", 1 << 17)),
        _pair("llama.embedding_length", _UINT32, struct.pack("<I", _WIDTH)),
        _pair("llama.block_count", _UINT32, struct.pack("<I", 1)),
        _pair("llama.feed_forward_length", _UINT32, struct.pack("<I", _WIDTH)),
        _pair("llama.attention.head_count", _UINT32, struct.pack("<I", 1)),
        _pair("llama.attention.layer_norm_rms_epsilon", _FLOAT32, struct.pack("<f", 1e-5)),
        _pair("tokenizer.ggml.model", _STRING, _string("llama")),
        _pair("tokenizer.ggml.tokens", _ARRAY, _array(_STRING, map(_string, _TOKENS))),
        _pair("tokenizer.ggml.scores", _ARRAY, _array(_FLOAT32, [bytes(4)] * len(_TOKENS))),
        _pair(
            "tokenizer.ggml.token_type",
            _ARRAY,
            _array(
                _INT32,
                [struct.pack("<i", kind) for kind in (_UNKNOWN, _CONTROL, _CONTROL)]
                + [struct.pack("<i", _BYTE)] * 256,
            ),
        ),
    ]
    places, data = b"", b""
    for name, shape in _shapes().items():
        places += _string(name) + struct.pack("<I", len(shape))
        places += struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", 0, len(data))
        values = _values(name, prod(shape))
        data += struct.pack(f"<{len(values)}f", *values)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(_shapes()), len(metadata))
    head += b"".join(metadata) + places
    return head + bytes(-len(head) % _ALIGNMENT) + data


def _shapes() -> dict[str, tuple[int, ...]]:
    vector, matrix = (_WIDTH,), (_WIDTH, _WIDTH)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (_WIDTH, len(_TOKENS)),
        "output_norm.weight": vector,
    }
    for name in ("attn_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = vector
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}.weight"] = matrix
    return shapes


def _values(name: str, size: int) -> list[float]:
    if "norm" in name:
        return [1.0] * size
    if name == "token_embd.weight":  # each token is one direction, and the likeliest next one
        return [float(at % _WIDTH == at // _WIDTH % _WIDTH) for at in range(size)]
    return [0.0] * size


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _array(kind: int, items: Iterable[bytes]) -> bytes:
    written = list(items)
    return struct.pack("<IQ", kind, len(written)) + b"".join(written)


def _pair(key: str, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value
