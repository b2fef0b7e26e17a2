"""The prefix index: which block holds the K and V of which tokens after which prefix.

Keys are exact (`PrefixKey`), so no collision can hand out somebody else's KV. A lookup costs
O(block_size) a block, not O(prefix), because a parent is an interned id:

```
 tokens   [You are a] [helpful b] [ot . Hi  ]
 key      (0, "...")   (1, "...")   (2, "...")        entry ids 1, 2, 3 from a counter
                ^____________|            an evicted parent's id is never given out again,
                                          so its children can no longer be reached
```

Mirrors the hash chain of vllm/v1/core/kv_cache_utils.py, with exact keys in place of hashes.
Chapter 8 reads this file.
"""

from collections.abc import Sequence
from itertools import count

from minivllm.cache.block import Block, PrefixKey

ROOT = 0  # the parent of a first block


class PrefixIndex:
    """`PrefixKey` -> block, and the counter of entry ids."""

    def __init__(self) -> None:
        self._blocks: dict[PrefixKey, Block] = {}
        self._next_entry = count(ROOT + 1)

    def __len__(self) -> int:
        return len(self._blocks)

    def get(self, key: PrefixKey) -> Block | None:
        """The block that holds these tokens after this prefix, if any."""
        return self._blocks.get(key)

    def insert(self, key: PrefixKey, block: Block) -> int:
        """Enter a full block and return the entry id that its children name as parent.

        If another block holds the same content already, that one stays, and its id is returned.
        """
        known = self._blocks.get(key)
        if known is not None:
            return known.entry_id
        assert block.key is None, f"{block} is in the index under another key"
        self._blocks[key] = block
        block.key, block.entry_id = key, next(self._next_entry)
        return block.entry_id

    def remove(self, block: Block) -> None:
        """Forget a block. Its children stay, unreachable, until they are evicted in turn."""
        assert block.key is not None, f"{block} is not in the index"
        del self._blocks[block.key]
        block.key, block.entry_id = None, 0

    def match(
        self, token_ids: Sequence[int], block_size: int, max_blocks: int, salt: str | None
    ) -> list[Block]:
        """The longest chain of at most `max_blocks` cached blocks from the start of `token_ids`."""
        found: list[Block] = []
        parent = ROOT
        for start in range(0, max_blocks * block_size, block_size):
            key = PrefixKey(parent, tuple(token_ids[start : start + block_size]), None, salt)
            block = self._blocks.get(key)
            if block is None:
                break
            found.append(block)
            parent = block.entry_id
        return found

    def check(self, blocks: Sequence[Block]) -> None:
        """Assert that index and blocks tell the same story."""
        for key, block in self._blocks.items():
            assert block.key == key and block.entry_id, f"index holds {block} under a foreign key"
        carrying = sum(block.key is not None for block in blocks)
        assert carrying == len(self._blocks), (
            f"{carrying} blocks carry a key, {len(self)} are known"
        )
