"""Several sources by weight: trees of shares, how they change over a run, and who is drawn when."""
