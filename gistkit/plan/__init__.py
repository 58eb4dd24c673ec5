"""Planning: ``gistkit.plan(model, batch, budget="12GiB")`` gives the plan of a training step that fits the budget.

The name is both: called, the package is :func:`gistkit.planning.plan`, where the arguments are explained
(``help(gistkit.plan.__call__)``); its modules are the data and the policies behind it (``gistkit.plan.plan.Plan``,
``gistkit.plan.hardware``, ``gistkit.plan.simulate``, ``gistkit.plan.policies``).
"""
