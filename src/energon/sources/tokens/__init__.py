"""Token files, which Megatron-LM calls indexed datasets: documents, or windows over them."""
