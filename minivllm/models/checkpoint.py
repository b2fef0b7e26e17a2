"""Tensors in a file: where each lies, and its rows, read a piece at a time. The safetensors format.

```
| header size: 8 bytes | header: JSON {name: {dtype, shape, data_offsets}} | data ... |
```

A file is untrusted input. Everything it says is checked against its size before it is believed,
so no number in it can make us allocate more than it holds. Data is read into small buffers, not
mapped: mapped pages would count as memory twice beside the parameters.

Knows nothing of models. Format: https://github.com/huggingface/safetensors#format. Chapter 3.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.base import ModelError

CHUNK_ELEMENTS = 4 << 20  # elements of one piece: the loader's scratch memory is a few times that
MAX_JSON_BYTES = 100 << 20  # headers and configs beyond that are no honest ones
SAFETENSORS_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its place, its torch-order shape, and how its bytes become numbers."""

    name: str
    path: Path
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    decode: Callable[[bytearray], Tensor]  # bytes of whole rows -> their elements, flat

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, rows) in order; a vector's rows are its elements.

        Raises:
            ModelError: the file went away or became shorter since its header was read.
        """
        num_rows, row_shape = self.shape[0], self.shape[1:]
        row_bytes = self.num_bytes // num_rows
        step = max(1, CHUNK_ELEMENTS // max(1, math.prod(row_shape)))
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                for row in range(0, num_rows, step):
                    buffer = bytearray(min(step, num_rows - row) * row_bytes)
                    if file.readinto(buffer) != len(buffer):
                        raise ModelError(
                            f"{self.path} ends inside tensor {self.name!r}: fetch it again"
                        )
                    yield row, self.decode(buffer).view(-1, *row_shape)
        except OSError as error:
            raise ModelError(f"cannot read {self.path}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: no such file, not JSON, or something else than an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ModelError(f"{path} is too large for a JSON file of a model: fetch it again")
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def parse_json(data: bytes, source: str) -> dict[str, Any]:
    """A JSON object from bytes; `source` names them in the ModelError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        raise ModelError(f"{source} is not valid JSON: fetch the model again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{source} must be a JSON object, not {type(value).__name__}")
    return value


def read_safetensors(path: Path) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file, by name. Reads the header only.

    Raises:
        ModelError: broken, truncated, or with a data type other than F32, F16, BF16.
    """
    try:
        size = os.path.getsize(path)
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_JSON_BYTES):
                raise ModelError(
                    f"{path} is no safetensors file or is cut off ({size:,} bytes, but its header "
                    f"claims {length:,}): fetch it again"
                )
            header = parse_json(file.read(length), f"the header of {path}")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    header.pop("__metadata__", None)
    start = 8 + length
    return {name: _safetensors_entry(path, name, header[name], start, size) for name in header}


def _safetensors_entry(path: Path, name: str, info: Any, start: int, size: int) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        numbers = [*shape, begin, end]
    except (TypeError, KeyError, ValueError):
        raise ModelError(f"the header of {path} describes {name!r} in no known way") from None
    if not isinstance(dtype, str) or dtype not in SAFETENSORS_DTYPES:
        raise ModelError(
            f"tensor {name!r} of {path} has data type {str(dtype)[:20]!r}, but only "
            f"{', '.join(SAFETENSORS_DTYPES)} are supported: use an unquantised checkpoint"
        )
    torch_dtype = SAFETENSORS_DTYPES[dtype]
    honest = all(type(n) is int and n >= 0 for n in numbers) and begin <= end <= size - start
    if not honest or math.prod(shape) * torch_dtype.itemsize != end - begin:
        raise ModelError(
            f"tensor {name!r} of {path} does not fit its file, which is broken or cut off: "
            f"fetch it again"
        )
    return TensorEntry(
        name, path, shape, start + begin, end - begin,
        lambda buffer: torch.frombuffer(buffer, dtype=torch_dtype),
    )  # fmt: skip
