"""Local training of a whole chunk of clients: the trainer, its backends, minibatches and layers.

`raydpfl.methods.local` says what a step does with its gradient, `backend_choice` which backend does
it, and `trainer.Trainer` does it. All backends (`docs/how.md` has a table of them) have the
mathematics of a plain loop over the clients and the loss of the task, and add corrections
(`Scaffold`). All but compiled, which takes linear rules alone, carry out any rule. All of them can
clip every sample's gradient and add noise to every step (the loop sample by sample).
"""
