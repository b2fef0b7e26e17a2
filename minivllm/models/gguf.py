"""GGUF: one file that holds metadata, a tokenizer and (mostly quantised) tensors.

```
| "GGUF" version, counts | key: type value ... | name dims type offset ... | padding | data ... |
```

The header is parsed here, strictly: every count is checked against the bytes that are left, so a
broken file is an error and never a crash, a loop or a large allocation. Turning quantised blocks
into numbers is left to the `gguf` package.

Knows nothing of models. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
Chapter 3.
"""

import math
import os
import struct
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from minivllm.base import ModelError
from minivllm.models.checkpoint import TensorEntry

MAX_DIMS = 4
STRING, ARRAY, BOOL = 8, 9, 7
# Metadata type -> numpy type of one number, little endian.
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", BOOL: "<u1",
           10: "<u8", 11: "<i8", 12: "<f8"}  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header: metadata by key (numbers, strings, lists of str, numpy arrays), tensors."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """A metadata value, or `default` when the key is absent.

        Raises:
            ModelError: the value is of another type than `kind`.
        """
        value = self.metadata.get(key)
        if value is None:
            return default
        if isinstance(value, bool) and kind is not bool or not isinstance(value, kind):
            raise ModelError(
                f"{self.path}: metadata {key!r} is a {type(value).__name__}, which "
                f"makes no sense there: the file is broken"
            )
        return value


class _Reader:
    """A cursor over the header's bytes that refuses to run past the end of the file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.position = path, data, 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is no valid GGUF file ({what}): fetch it again")

    def take(self, num_bytes: int) -> memoryview:
        if num_bytes > len(self.data) - self.position:
            raise self.fail("it ends too early")
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return str(self.take(self.number("Q")), "utf-8")
        except UnicodeDecodeError:
            raise self.fail("a string is not UTF-8") from None

    def value(self) -> Any:
        kind = self.number("I")
        if kind == ARRAY:
            return self._array()
        if kind == STRING:
            return self.string()
        number = self._numbers(kind, 1)[0].item()
        return bool(number) if kind == BOOL else number

    def _array(self) -> list[str] | np.ndarray:
        kind, length = self.number("I"), self.number("Q")
        if kind == STRING:
            if length * 8 > len(self.data) - self.position:
                raise self.fail("an array is longer than the file")
            return [self.string() for _ in range(length)]
        return self._numbers(kind, length)

    def _numbers(self, kind: int, length: int) -> np.ndarray:
        if kind not in SCALARS:
            raise self.fail(f"metadata of unknown type {kind}")
        dtype = np.dtype(SCALARS[kind])
        return np.frombuffer(self.take(length * dtype.itemsize), dtype).copy()


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a GGUF file of version 2 or 3, little endian.

    Raises:
        ModelError: broken, truncated, of another version, or one part of a split model.
    """
    try:
        size = os.path.getsize(path)
        data = memoryview(np.memmap(path, np.uint8, "r")) if size else memoryview(b"")
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None
    reader = _Reader(path, data)
    if bytes(data[:4]) != b"GGUF":
        raise reader.fail("it does not begin with GGUF")
    reader.take(4)
    if (version := reader.number("I")) not in (2, 3):
        raise reader.fail(f"version {version}, but 2 and 3 are supported")
    num_tensors, num_keys = reader.number("Q"), reader.number("Q")
    if num_tensors * 24 + num_keys * 12 > size:  # the least bytes that they can take
        raise reader.fail(f"{num_tensors:,} tensors and {num_keys:,} keys in {size:,} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = reader.string()
        metadata[key] = reader.value()
    infos = [_tensor_info(reader) for _ in range(num_tensors)]
    file = GGUFFile(path, metadata, {})
    if file.get("split.count", int, 1) > 1:
        raise ModelError(f"{path} is one part of a split GGUF: merge the parts into one file first")
    alignment = file.get("general.alignment", int, 32)
    if not 0 < alignment <= 1 << 20:
        raise reader.fail(f"alignment {alignment}")
    start = -(-reader.position // alignment) * alignment
    for info in infos:
        entry = _entry(reader, start, size, *info)
        if entry.name in file.tensors:
            raise reader.fail(f"tensor {entry.name!r} is there twice")
        file.tensors[entry.name] = entry
    return file


def _tensor_info(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """(name, torch-order shape, type, data offset). The file lists the fastest dimension first."""
    name, num_dims = reader.string(), reader.number("I")
    if not 1 <= num_dims <= MAX_DIMS:
        raise reader.fail(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(reader.number("Q") for _ in range(num_dims))[::-1]
    return name, shape, reader.number("I"), reader.number("Q")


def _entry(
    reader: _Reader,
    start: int,
    size: int,
    name: str,
    shape: tuple[int, ...],
    kind: int,
    offset: int,
) -> TensorEntry:
    try:
        quant = gguf.GGMLQuantizationType(kind)
    except ValueError:
        raise reader.fail(f"tensor {name!r} has unknown type {kind}") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    if 0 in shape or shape[-1] % block or (block > 1 and len(shape) == 1):
        raise reader.fail(f"tensor {name!r} of shape {list(shape)} in blocks of {block}")
    num_bytes = math.prod(shape) // block * block_bytes
    if start + offset + num_bytes > size:
        raise reader.fail(f"tensor {name!r} lies beyond its end")
    decode = partial(_decode, quant, block_bytes * (shape[-1] // block), name, reader.path)
    return TensorEntry(name, reader.path, shape, start + offset, num_bytes, decode)


def _decode(
    quant: gguf.GGMLQuantizationType, row_bytes: int, name: str, path: Path, buffer: bytearray
) -> Tensor:
    """Whole rows of quantised blocks -> fp32 elements, flat."""
    # A piece of a vector may be shorter than its one row; vectors are never quantised.
    rows = np.frombuffer(buffer, np.uint8).reshape(-1, min(row_bytes, len(buffer)))
    try:
        # Broken scales overflow to infinity; that is the file's content, not our error.
        with np.errstate(all="ignore"):
            values = gguf.dequantize(rows, quant)
    except NotImplementedError:
        raise ModelError(
            f"tensor {name!r} of {path} has type {quant.name}, which the gguf "
            f"package cannot turn into numbers: use another quantisation"
        ) from None
    return torch.from_numpy(values.reshape(-1))
