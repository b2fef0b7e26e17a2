"""A block of KV memory, and the queue of those that nobody refers to. Ids only; no bytes.

Mirrors vllm/v1/core/kv_cache_utils.py (KVCacheBlock, FreeKVCacheBlockQueue). Chapter 4 reads this.
"""

from collections.abc import Iterator
from typing import NamedTuple


class PrefixKey(NamedTuple):
    """What a full block is found by: everything its K and V depend on, compared exactly.

    `parent` is the entry id of the block before it, 0 for the first. Entry ids are never reused, so
    a chain of keys names the whole prefix although each key holds one block of tokens.
    """

    parent: int
    token_ids: tuple[int, ...]
    adapter: str | None = None
    salt: str | None = None


class Block:
    """One block: `block_size` slots of the KV cache, the same ones in every layer."""

    __slots__ = ("block_id", "ref_count", "key", "entry_id", "previous", "next")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0  # block tables that hold it
        self.key: PrefixKey | None = None  # set while the prefix index knows it
        self.entry_id = 0  # its children's `parent`; 0 = not in the index
        self.previous: Block | None = None  # neighbours in the free queue
        self.next: Block | None = None

    def __repr__(self) -> str:
        cached = f", entry={self.entry_id}" if self.entry_id else ""
        return f"Block({self.block_id}, refs={self.ref_count}{cached})"


class FreeQueue:
    """Blocks with no reference, in the order in which they lose their content.

    ```
     evicted next                                       freed last
     head <-> [7] <-> [3] <-> [9] <-> ... <-> [4] <-> tail
                       ^ a prefix hit takes a block out of the middle in O(1): hence linked
    ```
    """

    def __init__(self) -> None:
        self._head, self._tail = Block(-1), Block(-1)  # guards, so that no end is special
        self._head.next, self._tail.previous = self._tail, self._head
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put a block at the end: it will be evicted last."""
        last = self._tail.previous
        assert last is not None and block.next is None, f"{block} is already queued"
        last.next, block.previous = block, last
        block.next, self._tail.previous = self._tail, block
        self._count += 1

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it is."""
        previous, following = block.previous, block.next
        assert previous is not None and following is not None, f"{block} is not queued"
        previous.next, following.previous = following, previous
        block.previous = block.next = None
        self._count -= 1

    def popleft(self) -> Block:
        """Take the block that is evicted next."""
        block = self._head.next
        assert block is not None and block is not self._tail, "popleft of an empty queue"
        self.remove(block)
        return block
