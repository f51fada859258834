"""Gradients that concern several ranks.

* `averaging`: which gradients are averaged over which replicas.
* `data_parallel`: the mean over replicas, and whether all of them train the same parameters.
* `tied`: the sum for a parameter that stages of several ranks use.
* `grad_norm`: the norm of the gradients of all ranks.
* `found_inf`: an overflow on one rank counts on all.
"""
