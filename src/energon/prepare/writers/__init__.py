"""Write shards: samples become tar members, shard by shard, here or in a store."""
