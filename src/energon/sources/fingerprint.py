"""What a saved state must find unchanged of a source."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def content_fingerprint(num_samples: int, content: Any) -> dict[str, Any]:
    """Return the number of samples, and a digest of what decides which they are, as JSON."""
    digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()
    return {"samples": num_samples, "index": digest}
