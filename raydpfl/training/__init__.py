"""Local training: the trainer, its backends, minibatches and layers."""
