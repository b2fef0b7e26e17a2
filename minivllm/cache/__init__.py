"""The KV cache's bookkeeping: blocks, pool, prefix index, tables. Ids only, no bytes."""
