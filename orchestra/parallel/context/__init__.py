"""Context parallelism: sequences cut over a group of ranks, from outside of the model."""
