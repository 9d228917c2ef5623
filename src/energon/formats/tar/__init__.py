"""Tar archives: the only parser, and the only writer.

`headers.py` interprets one header, `parser.py` a row of headers, and groups members into samples.
Two drivers give it blocks: `scan.py` reads headers only, wherever they are, and `stream.py` reads
everything once, in order, and hands out samples. Both have a bulk mode for plain headers.
`writer.py` writes archives. Nothing in here opens anything remote.
"""
