"""All blocks of the KV cache: who may have one, who shares one, whose content goes first.

```
            allocate                free (tail first)
  free ───────────────▶ referenced ───────────────────▶ free, content kept ──┐
   ▲                        ▲                                │               │ allocate:
   │                        └─────────── touch ──────────────┘               │ evict, then
   └──────────────────────────────────────────────────────────────────────────┘ reuse
```

Block 0 is the null block: padding writes there, and nobody ever owns it.

Mirrors vllm/v1/core/block_pool.py. Chapter 4 reads this file; chapter 8 adds the prefix index.
"""

from collections.abc import Iterable, Sequence

from minivllm.base import UserError
from minivllm.cache.block import Block, FreeQueue
from minivllm.cache.prefix import PrefixIndex
from minivllm.trace import EventSink, Evicted, NullRecorder

NULL_BLOCK = 0


class BlockPool:
    """`num_blocks` blocks, the null block included.

    Raises:
        UserError: there would be no block to hand out.
    """

    def __init__(self, num_blocks: int, recorder: EventSink | None = None) -> None:
        if num_blocks < 2:
            raise UserError(
                f"the KV cache has {num_blocks} block(s), but needs at least 2 (one is the null "
                f"block): give it more memory or set num_gpu_blocks_override"
            )
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.index = PrefixIndex()
        self.recorder: EventSink = NullRecorder() if recorder is None else recorder
        self.step = 0  # stamped on events; the scheduler sets it
        # Totals since the start: blocks handed out, let go by their last owner, found by prefix.
        self.num_allocated = self.num_freed = self.num_touched = 0
        self._free = FreeQueue()
        for block in self.blocks[NULL_BLOCK + 1 :]:
            self._free.append(block)

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out, cached ones that nobody refers to included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return len(self.blocks) - 1

    def allocate(self, num_blocks: int) -> list[Block] | None:
        """Hand out blocks with one reference each, all or nothing: None when there are not enough.

        Takes the least recently freed first; a cached one loses its content.
        """
        if num_blocks > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(num_blocks)]
        for block in taken:
            if block.key is not None:
                self.index.remove(block)
                if self.recorder.enabled:
                    self.recorder.emit(Evicted(self.step, "", block.block_id))
            block.ref_count = 1
        self.num_allocated += num_blocks
        return taken

    def touch(self, blocks: Iterable[Block]) -> None:
        """Add a reference to blocks found in the index, taking them out of the free queue."""
        for block in blocks:
            if block.ref_count == 0:
                self._free.remove(block)
            block.ref_count += 1
            self.num_touched += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Drop one reference to each block of a table, given in table order.

        The tail is queued first and so evicted first: a prefix is useful only from the front.
        """
        for block in reversed(blocks):
            assert block.ref_count > 0, f"{block} was freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                self._free.append(block)
                self.num_freed += 1

    def reset_index(self) -> None:
        """Forget every cached prefix; references stay as they are."""
        for block in self.blocks:
            if block.key is not None:
                self.index.remove(block)

    def check(self, tables: Iterable[Sequence[Block]]) -> None:
        """Assert every invariant, given all block tables."""
        references = [0] * len(self.blocks)
        for table in tables:
            for block in table:
                references[block.block_id] += 1
        free = [block.block_id for block in self._free]
        assert len(free) == len(set(free)) == len(self._free), "the free queue repeats a block"
        for block in self.blocks:
            held, queued = references[block.block_id], block.next is not None
            assert block.ref_count == held, f"{block} is held by {held} tables"
            assert block.block_id != NULL_BLOCK or not (held or queued), "the null block is in use"
            assert block.block_id == NULL_BLOCK or queued == (held == 0), f"{block} is misplaced"
        self.index.check(self.blocks)
