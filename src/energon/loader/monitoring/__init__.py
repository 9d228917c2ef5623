"""What a loader spends its time on, in figures and in one sentence."""
