"""How batches cross from worker processes to the trainer."""
