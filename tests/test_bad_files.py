"""Broken and hostile model files: a clean load or one sentence, no crash, hang or large allocation.

A child process with a limit on its address space works through 200 mutated files of each format
(bits flipped, cut off, length fields overwritten by huge numbers, types swapped), from one seed.
"""

import json
import os
import random
import struct
import subprocess
import sys

import gguf
import numpy as np
import pytest
from model_files import write_gguf
from test_decoder import hf_model

from minivllm.base import ModelError
from minivllm.models.checkpoint import read_safetensors
from minivllm.models.gguf import read_gguf
from minivllm.models.hub import resolve_model
from minivllm.models.model_config import read_model_config

CASES = 200
SECONDS_A_CASE = 5.0
HUGE = [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, (1 << 64) - 1]

# Loads every file named on the command line. Peak memory is traced in Python and numpy; torch and
# all else meet the limit on the address space.
CHILD = """
import json, resource, sys, time, tracemalloc
import torch
from minivllm.base import ModelError
from minivllm.models.decoder import Decoder
from minivllm.models.hub import resolve_model
from minivllm.models.model_config import read_model_config
from minivllm.models.tokenizer import load_tokenizer
from minivllm.models.weights import load_weights

torch.set_num_threads(1)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
tracemalloc.start()
for path in sys.argv[1:]:
    start = time.perf_counter()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    try:
        files = resolve_model(path)
        config = read_model_config(files)
        model = Decoder(config, dtype=torch.float32, device="cpu", max_model_len=64)
        load_weights(model, files, config, torch.float32, "cpu")
        if path.endswith(".gguf"):
            load_tokenizer(files)
        outcome = ["loaded", ""]
    except ModelError as error:
        outcome = ["refused", str(error)]
    except BaseException as error:
        outcome = ["crashed", repr(error)]
    peak = tracemalloc.get_traced_memory()[1] - before
    print(json.dumps([path, *outcome, time.perf_counter() - start, peak]), flush=True)
"""


def mutate(data: bytes, generator: random.Random, header: int) -> bytes:
    """One fault, mostly in the first `header` bytes: that is where lies do harm."""
    changed = bytearray(data)
    where = generator.randrange(header if generator.random() < 0.9 else len(data))
    match generator.randrange(5):
        case 0:
            for _ in range(generator.randint(1, 8)):
                changed[generator.randrange(header)] ^= 1 << generator.randrange(8)
        case 1:
            del changed[where:]
        case 2:  # a length, count, dimension or offset, wherever it happens to lie
            changed[where : where + 8] = struct.pack("<Q", generator.choice(HUGE))
        case 3:  # a type or a small count
            changed[where : where + 4] = struct.pack("<I", generator.randrange(40))
        case 4:
            changed[where : where + generator.randint(1, 64)] = generator.randbytes(
                generator.randint(0, 64)
            )
    return bytes(changed)


def run_child(paths: list[str]) -> list[list]:
    result = subprocess.run(
        [sys.executable, "-c", CHILD, *paths], capture_output=True, text=True, timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-2000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def check_outcomes(outcomes: list[list], size: int) -> None:
    assert len(outcomes) == CASES + 1
    assert outcomes[0][1] == "loaded", outcomes[0]  # the sound file
    kinds = [outcome for _, outcome, *_ in outcomes]
    assert kinds.count("refused") > CASES // 3  # the mutations do reach what they should
    for path, outcome, message, seconds, peak in outcomes:
        assert outcome != "crashed", (path, message)
        assert "\n" not in message and len(message) < 600, (path, message)
        assert seconds < SECONDS_A_CASE, (path, seconds)
        # Python objects are some times as large as the bytes they are read from.
        assert peak < 10 * size + (2 << 20), (path, peak)


def tokenizer_keys() -> dict:
    """A small byte-level vocabulary, so that the tokenizer's part of a GGUF is mutated too."""
    tokens = [*"abcdefgh", "ab", "cd", "abcd", "<eos>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 11 + [3],
        "tokenizer.ggml.merges": ["a b", "c d", "ab cd"],
        "tokenizer.ggml.eos_token_id": 11,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def test_mutated_gguf(tmp_path):
    hf = hf_model("llama", intermediate_size=96)
    sound = write_gguf(tmp_path / "sound.gguf", hf, quant="Q8_0", metadata=tokenizer_keys())
    data = sound.read_bytes()
    header = min(entry.offset for entry in read_gguf(sound).tensors.values())
    generator = random.Random(20)
    paths = [str(sound)]
    for case in range(CASES):
        path = tmp_path / f"{case}.gguf"
        path.write_bytes(mutate(data, generator, header))
        paths.append(str(path))
    check_outcomes(run_child(paths), len(data))


def test_mutated_safetensors(tmp_path):
    sound = tmp_path / "sound"
    hf_model("llama").save_pretrained(sound)
    data = (sound / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    config = (sound / "config.json").read_bytes()
    generator = random.Random(21)
    paths = [str(sound)]
    for case in range(CASES):
        folder = tmp_path / str(case)
        folder.mkdir()
        # One in four has its fault in config.json instead.
        broken_config = case % 4 == 3
        changed = mutate(config, generator, len(config)) if broken_config else config
        (folder / "config.json").write_bytes(changed)
        changed = data if broken_config else mutate(data, generator, header)
        (folder / "model.safetensors").write_bytes(changed)
        paths.append(str(folder))
    check_outcomes(run_child(paths), len(data))


def gguf_bytes(*, magic=b"GGUF", version=3, tensors=0, keys=0, rest=b"") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, keys) + rest


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


TENSOR = text(b"t")  # how the description of a tensor begins


class TestGGUFHeader:
    """Each length that a header can lie about."""

    @pytest.mark.parametrize(
        "data, part",
        [
            (b"", "does not begin with GGUF"),
            (b"GGU", "does not begin with GGUF"),
            (b"GGUF", "ends too early"),
            (gguf_bytes(magic=b"GGML"), "does not begin with GGUF"),
            (gguf_bytes(version=1), "version 1"),
            (gguf_bytes(version=3 << 24), "version"),  # big endian
            (gguf_bytes(tensors=1 << 60), "tensors and"),
            (gguf_bytes(keys=1 << 60), "tensors and"),
            (gguf_bytes(keys=1, rest=struct.pack("<Q", 1 << 62) + b"x" * 50), "ends too early"),
            (gguf_bytes(keys=1, rest=text(b"k") + struct.pack("<I", 99)), "unknown type 99"),
            (gguf_bytes(keys=1, rest=text(b"\xff\xfe") + bytes(20)), "not UTF-8"),
            # arrays: of strings, of numbers, nested
            (gguf_bytes(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 8, 1 << 61)), "longer"),
            (gguf_bytes(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 5, 1 << 61)), "too early"),
            (gguf_bytes(keys=1, rest=text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "unknown type 9"),
            # tensors: dimensions, type, offset
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<I", 5) + bytes(80)), "5 dim"),
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<IQIQ", 1, 4, 200, 0)), "type 200"),
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<IQIQ", 1, 0, 0, 0)), "shape [0]"),
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<IQIQ", 1, 1 << 62, 0, 0)),
             "beyond its end"),
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<IQQIQ", 2, 33, 1, 8, 0)),
             "blocks of 32"),
            (gguf_bytes(tensors=1, rest=TENSOR + struct.pack("<IQIQ", 1, 1, 0, 1 << 63)),
             "beyond its end"),
        ],
    )  # fmt: skip
    def test_lies(self, data, part, tmp_path):
        path = tmp_path / "m.gguf"
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            read_gguf(path)
        assert part in str(caught.value)

    def test_same_tensor_twice(self, tmp_path):
        info = text(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)
        (tmp_path / "m.gguf").write_bytes(gguf_bytes(tensors=2, rest=info * 2 + bytes(64)))
        with pytest.raises(ModelError, match="'t' is there twice"):
            read_gguf(tmp_path / "m.gguf")

    def test_agrees_with_the_gguf_package(self, tmp_path):
        """On a sound file our parser and the package's reader see the same thing."""
        hf = hf_model("qwen2", intermediate_size=96)
        path = write_gguf(tmp_path / "m.gguf", hf, quant="Q8_0", metadata=tokenizer_keys())
        ours, theirs = read_gguf(path), gguf.GGUFReader(path)
        for key, field in theirs.fields.items():
            if not key.startswith("GGUF."):
                value = ours.metadata[key]
                assert np.array_equal(np.array(value), np.array(field.contents())), key
        for tensor in theirs.tensors:
            entry = ours.tensors[tensor.name]
            assert entry.shape == tuple(int(n) for n in tensor.shape[::-1])
            assert (entry.offset, entry.num_bytes) == (tensor.data_offset, tensor.n_bytes)


class TestSafetensorsHeader:
    @pytest.mark.parametrize(
        "data, part",
        [
            (b"", "is cut off"),
            (b"\x00" * 7, "is cut off"),
            (struct.pack("<Q", 1 << 63) + b"{}", "claims 9,223,372,036,854,775,808"),
            (struct.pack("<Q", 2) + b"[]", "JSON object"),
            (struct.pack("<Q", 1) + b"{", "not valid JSON"),
            (b'{"t": 3}', "no known way"),
            (b'{"t": {"dtype": "F32", "shape": [1]}}', "no known way"),
            (b'{"t": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}', "'F8_E4M3'"),
            (b'{"t": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}', "data type '[]'"),
            (b'{"t": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "does not fit"),
            (b'{"t": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}', "does not fit"),
            (b'{"t": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}', "does not fit"),
            (b'{"t": {"dtype": "F32", "shape": [2, 9000000000000], "data_offsets": [0, 0]}}',
             "does not fit"),
        ],
    )  # fmt: skip
    def test_lies(self, data, part, tmp_path):
        if data.startswith(b"{"):
            data = struct.pack("<Q", len(data)) + data
        path = tmp_path / "m.safetensors"
        path.write_bytes(data)
        with pytest.raises(ModelError) as caught:
            read_safetensors(path)
        assert part in str(caught.value)


def test_truncated_gguf(tmp_path):
    """The commonest fault: a download that stopped."""
    path = write_gguf(tmp_path / "m.gguf", hf_model("llama"))
    os.truncate(path, path.stat().st_size * 2 // 3)
    with pytest.raises(ModelError, match="lies beyond its end.*fetch it again"):
        read_model_config(resolve_model(str(path)))
