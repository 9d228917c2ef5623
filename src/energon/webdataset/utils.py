"""Switches and small helpers."""

from __future__ import annotations

enforce_security: bool = True
"""Whether unpickling and shell commands are refused unless they are allowed by name."""
