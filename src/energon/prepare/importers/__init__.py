"""What shards can be made from: each file reads one kind of source as samples."""
