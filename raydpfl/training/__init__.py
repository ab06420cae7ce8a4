"""Local training of a whole chunk of clients: the trainer, its backends, minibatches and layers.

All backends (`docs/how.md` has a table of them) have the mathematics of a plain loop over the
clients, can clip every sample's gradient, and add corrections (`Scaffold`) and noise to every step.
"""
