"""Block tables: which blocks hold the K and V of which request, and where the next tokens go.

```
 request   |<-- num_computed_tokens -->|<- new tokens ->|
 tokens    0123 4567 89ab cdef ghij klmn opqr st
 table     [ 7] [ 3] [ 3'] ...           [12] [ 5]        block ids
            ^^^^^^^^^ committed to the prefix index once full
```

The order of a step: `find_cached_blocks` and `adopt` for a request that joins, `allocate_slots` for
the tokens it computes, `commit` once nothing can take the step away from it any more.

Mirrors vllm/v1/core/kv_cache_manager.py; left out: several cache groups, external caches.
Chapters 4 and 8 read this file.
"""

from collections.abc import Sequence

from minivllm.base import cdiv
from minivllm.cache.block import Block, PrefixKey
from minivllm.cache.pool import BlockPool
from minivllm.cache.prefix import ROOT
from minivllm.request import Request


class BlockTable:
    """One request's blocks in order, and how far they are entered in the prefix index."""

    __slots__ = ("blocks", "num_committed", "parent")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.num_committed = 0  # blocks entered in (or found in) the index
        self.parent = ROOT  # entry id of the last of them


class KVCacheManager:
    """Hands the slots of a `BlockPool` to requests. Holds no tokens and no tensors."""

    def __init__(
        self, pool: BlockPool, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        self.pool = pool
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[str, BlockTable] = {}

    @property
    def capacity(self) -> int:
        """Tokens that the whole cache can hold."""
        return self.pool.num_usable * self.block_size

    @property
    def usage(self) -> float:
        """Share of the blocks that some request refers to, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_usable

    def block_ids(self, request: Request) -> tuple[int, ...]:
        """The request's block table as ids; empty when it has none."""
        table = self._tables.get(request.request_id)
        return tuple(block.block_id for block in table.blocks) if table else ()

    def find_cached_blocks(self, request: Request) -> list[Block]:
        """Cached blocks that hold the start of the request's tokens.

        At least one token is left out, however much is cached: its logits are needed. A request
        that wants the log-probabilities of its prompt needs all of them computed.
        """
        if not self.enable_prefix_caching or request.params.prompt_logprobs is not None:
            return []
        max_blocks = (len(request.token_ids) - 1) // self.block_size
        return self.pool.index.match(request.token_ids, self.block_size, max_blocks, request.salt)

    def num_blocks_needed(self, num_tokens: int, cached: Sequence[Block]) -> int:
        """Free blocks that a new request takes: new ones, and cached ones nobody refers to."""
        unreferenced = sum(block.ref_count == 0 for block in cached)
        return cdiv(num_tokens, self.block_size) - len(cached) + unreferenced

    def adopt(self, request: Request, cached: list[Block]) -> None:
        """Open the request's table with the blocks found for it."""
        assert request.request_id not in self._tables, f"{request} has a table already"
        self.pool.touch(cached)
        table = self._tables[request.request_id] = BlockTable()
        table.blocks = cached
        table.num_committed = len(cached)
        table.parent = cached[-1].entry_id if cached else ROOT

    def allocate_slots(self, request: Request, num_tokens: int) -> tuple[int, ...] | None:
        """Make room for the next `num_tokens` tokens: ids of the new blocks, or None: no room."""
        blocks = self._tables[request.request_id].blocks
        missing = cdiv(request.num_computed_tokens + num_tokens, self.block_size) - len(blocks)
        if missing <= 0:
            return ()
        new = self.pool.allocate(missing)
        if new is None:
            return None
        blocks += new
        return tuple([block.block_id for block in new])

    def commit(self, request: Request) -> None:
        """Enter the request's full blocks in the prefix index.

        Called at schedule time, when the blocks' K and V are about to be written by the step at
        hand: a request later in the same step may already share them, because every layer writes
        all K and V before it reads any.
        """
        if not self.enable_prefix_caching:
            return
        table = self._tables[request.request_id]
        size, tokens = self.block_size, request.token_ids
        # Tokens still being sampled have no id yet: their block has to wait.
        num_full = min(request.num_computed_tokens, len(tokens)) // size
        for i in range(table.num_committed, num_full):
            key = PrefixKey(
                table.parent, tuple(tokens[i * size : (i + 1) * size]), None, request.salt
            )
            table.parent = self.pool.index.insert(key, table.blocks[i])
            table.num_committed = i + 1

    def free(self, request: Request) -> tuple[int, ...]:
        """Close the request's table; ids of its blocks in the order in which they were freed."""
        table = self._tables.pop(request.request_id, None)
        if table is None:
            return ()
        self.pool.free(table.blocks)
        return tuple(block.block_id for block in reversed(table.blocks))

    def check(self, requests: Sequence[Request]) -> None:
        """Assert every invariant, given all requests that hold blocks."""
        self.pool.check(table.blocks for table in self._tables.values())
        assert {r.request_id for r in requests} == set(self._tables), "a table without its request"
        for request in requests:
            table = self._tables[request.request_id]
            held = len(table.blocks) * self.block_size
            assert request.num_computed_tokens <= held, f"{request} computed beyond its table"
            # What a later step writes must be the request's own, and unknown to the index.
            for block in table.blocks[request.num_computed_tokens // self.block_size :]:
                assert block.ref_count == 1 and block.key is None, f"{request} would write {block}"
            for i, block in enumerate(table.blocks[: table.num_committed]):
                if block.key is not None:
                    tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
                    assert block.key.token_ids == tuple(tokens), f"{block} holds other tokens"
