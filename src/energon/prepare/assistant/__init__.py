"""The assistant of `energon prepare`: shows a folder of shards and asks how to prepare it."""
