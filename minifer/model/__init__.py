"""The plain model and what it needs: passes, config, weights, cache, tokenizer, sampling. Knows nothing of ranks."""
