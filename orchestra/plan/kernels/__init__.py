"""What kernels take on a GPU, counted from shapes: tiles of products, and passes over memory."""
