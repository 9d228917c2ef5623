"""Drills: faults, random pipelines and hostile bytes, tried for as long as they are given."""
