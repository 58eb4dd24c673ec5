"""Forms of saved tensors as operators of a graph, and which tensor takes which."""
