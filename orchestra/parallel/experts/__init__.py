"""Expert parallelism: the experts of each layer shared out over ranks, and tokens brought to them."""
