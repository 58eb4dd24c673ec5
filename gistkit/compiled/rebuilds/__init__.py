"""Which saved tensors are kept and which are computed anew: the choice, and what it knows of forward."""
