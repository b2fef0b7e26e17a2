"""The glossary: one word, one meaning, and every name of the code that it gives exists."""

import importlib
import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
TEXT = (DOCS / "glossary.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- \*\*(.+?)\*\*: (.+)$", TEXT, re.MULTILINE)
# Words of the course that this code has; later parts bring theirs.
WORDS = """request, token, prompt, step, plan, batch, prefill, decode, chunk, token budget,
KV cache, block, block size, block table, slot, slot mapping, free queue, reference count, touch,
evict, prefix hit, preempt, recompute, TTFT, throughput, online softmax, log-sum-exp, split-KV,
tile, greedy, nucleus"""


def _exists(name: str) -> bool:
    """Whether `minivllm.a.b.C.d` is a module or can be reached from one."""
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            # Slots and annotations of dataclasses count: they are what an instance has.
            known = getattr(found, "__annotations__", {})
            if not hasattr(found, part) and part not in known:
                return False
            found = getattr(found, part, None)
        return True
    return False


def test_each_word_is_defined_once():
    words = [word.lower() for word, _ in ENTRIES]
    assert len(words) == len(set(words))
    assert len(words) == TEXT.count("\n- "), "an entry is not of the form «- **word**: meaning»"


def test_the_words_of_the_course_are_there():
    words = {word for word, _ in ENTRIES}
    wanted = {word.strip() for word in WORDS.replace("\n", " ").split(",")}
    assert wanted - words == set()


def test_each_meaning_ends_and_is_no_essay():
    for word, meaning in ENTRIES:
        sentence = re.sub(r" `minivllm\.[\w.]+`$", "", meaning)
        assert sentence.endswith("."), word
        assert len(sentence) < 160, word


def test_every_name_of_the_code_exists():
    names = re.findall(r"`(minivllm\.[\w.]+)`", TEXT)
    assert len(names) > 20
    assert [name for name in names if not _exists(name)] == []


def test_a_wrong_name_would_be_found():
    assert not _exists("minivllm.cache.pool.BlockPool.alocate")
    assert not _exists("minivllm.cache.pol")
