"""What a sample and a batch are: typed dataclasses, crude dicts, and how lists of them collate."""
