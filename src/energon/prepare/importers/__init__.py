"""What shards can be made of: each file reads one kind of source as samples."""
