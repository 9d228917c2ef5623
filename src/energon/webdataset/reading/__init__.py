"""From addresses of shards to samples: open, fetch, unpack, parse."""
